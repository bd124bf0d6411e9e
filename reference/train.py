"""Train the reference model: `python -m reference.train`.

The sequence length increases whenever the exact match of the answers in new training conversations
passes a threshold. The schedule counts tokens, not time, and the checkpoint holds the state of the
data's random generator: a stopped run goes on as if it had not been stopped. Needs no data:
conversations are generated during training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from reference import MODEL_PATH
from reference.architecture import build_model
from reference.data import ANSWER, ORDINARY, Batch, BatchMaker, Shares
from reference.muon import Muon
from reference.tokenizer import train_tokenizer

LENGTHS = (192, 512, 1024, 2048, 4096, 8192)
# Exact match of the answers at which a run continues with the next length.
PASS_AT = (0.92, 0.93, 0.93, 0.93, 0.95, 1.0)
# Steps after which a run continues with the next length in any case.
MAX_STEPS = (10_000, 600, 400, 400, 300, 10_000)
SHORTER_SHARE = 0.4
# Share of the mixed language at each length: the first teaches recall by name, in one form.
MIXED_SHARES = (0.0, 0.7, 0.7, 0.7, 0.7, 0.7)
# Shares of repeated random tokens, of bare facts among the rest, of listings among mixed bare facts.
DRILLS_SHARE = 0.15
LISTS_SHARE = 0.25
LISTINGS_SHARE = 0.4
LONGEST_POSITION = 12_288
LANGUAGE_WEIGHT = 0.3
WARM_UP_STEPS = 50
LEARNING_RATE = 3e-3

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Progress:
    """Progress of a run, written with every checkpoint.

    `level` is an index into LENGTHS; `accuracy` a moving mean of the answers' exact match at this
    level.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    steps_at_level: int = 0
    passed_at_tokens: list[int] = field(default_factory=list)


def compute_logits(
    model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Logits `[rows, tokens, vocabulary]` at any ascending positions.

    The model's layers are called one by one, because its forward function takes jumping positions
    for packed sequences.
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    for layer in model.model.layers:
        hidden = layer(
            hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions
        )
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden))
    return logits


def step_function(model: LlamaForCausalLM, compiled: bool) -> Step:
    """A function of ids, positions and classes that returns the loss and right predictions."""

    def step(
        ids: torch.Tensor, positions: torch.Tensor, classes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = compute_logits(model, ids, positions)[:, :-1].float()
        targets = ids[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        kinds = classes[:, 1:].flatten()
        answer = (kinds == ANSWER).float()
        ordinary = (kinds == ORDINARY).float()
        answer_loss = (losses * answer).sum() / answer.sum().clamp(min=1)
        ordinary_loss = (losses * ordinary).sum() / ordinary.sum().clamp(min=1)
        return answer_loss + LANGUAGE_WEIGHT * ordinary_loss, logits.argmax(-1) == targets

    return torch.compile(step, dynamic=False) if compiled else step


def build_optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Build Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices = [
        each for name, each in model.named_parameters() if each.ndim == 2 and "layers" in name
    ]
    others = [
        each for name, each in model.named_parameters() if not (each.ndim == 2 and "layers" in name)
    ]
    return [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_scale(progress: Progress, n_tokens: int) -> float:
    """Learning rate as a share of its maximum: warm-up, constant, linear decay in the last half."""
    warm = min(1.0, (progress.step + 1) / WARM_UP_STEPS)
    left = max(0.0, 1 - progress.tokens / n_tokens)
    return warm * min(1.0, 0.01 + 2 * left)


@dataclass(frozen=True)
class Plan:
    """What a run does; a stopped run is resumed with the same plan.

    `n_tokens` is the length of the schedule, `level` the index into LENGTHS to start at,
    `start_from` a model folder to take the first weights from. Without a `tokenizer` one is trained.
    """

    folder: Path
    export: Path
    n_tokens: int
    batch_tokens: int = 8192
    seed: int = 0
    compiled: bool = True
    bf16: bool = False
    tokenizer: Path | None = MODEL_PATH
    start_from: Path | None = None
    level: int = 0
    learning_rate: float = LEARNING_RATE


class Run:
    """One training run with its checkpoint folder."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.plan = plan
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = self._tokenizer()
        self.model = build_model(self.tokenizer)
        if plan.start_from is not None:
            weights = LlamaForCausalLM.from_pretrained(plan.start_from, dtype=torch.float32)
            self.model.load_state_dict(weights.state_dict())
        torch.nn.Module.to(self.model, self.device)
        self.average = [each.detach().clone() for each in self.model.parameters()]
        self.optimizers = build_optimizers(self.model, plan.learning_rate)
        self.progress = Progress(level=plan.level)
        self.data = BatchMaker(self.tokenizer, plan.seed)
        self._resume()
        self.step = step_function(self.model, plan.compiled)
        self.recent: dict[str, list[float]] = defaultdict(list)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The plan's tokenizer, or one that is trained at the start of the run."""
        folder = self.plan.tokenizer or self.plan.folder / "tokenizer"
        if not folder.exists():
            train_tokenizer().save_pretrained(folder)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer

    def train(self, save_seconds: float) -> None:
        """Train until the schedule is over; save every `save_seconds`."""
        saved = self.progress.seconds
        while self.progress.tokens < self.plan.n_tokens:
            self.advance()
            if self.progress.step % 50 == 0:
                self._report()
            if self.progress.seconds - saved > save_seconds:
                saved = self.progress.seconds
                self.save()
        self.save()

    def advance(self) -> None:
        """Train for one step, and go on to the next length if the present one is learned."""
        started = time.monotonic()
        length = self._length()
        rows = max(1, self.plan.batch_tokens // length)
        self.recent["loss"].append(self._train_step(self._batch(rows, length)))
        self.progress.step += 1
        self.progress.tokens += rows * length
        self._change_level()
        self.progress.seconds += time.monotonic() - started

    def _length(self) -> int:
        """Length of the present level, sometimes a shorter one, so that it is not forgotten."""
        level = self.progress.level
        if level > 1 and self.data.rng.random() < (0.8 if self._closing() else SHORTER_SHARE):
            level = self.data.rng.randrange(1, level)
        return LENGTHS[level]

    def _closing(self) -> bool:
        """True if the last 6% of the tokens have begun: conversations of every length, no drills."""
        return self.progress.tokens > 0.94 * self.plan.n_tokens

    def _batch(self, rows: int, length: int) -> Batch:
        closing = self._closing()
        shares = Shares(
            stretched=0.3 if self.progress.level == 0 else 0.4,
            drills=0.0 if closing else DRILLS_SHARE,
            lists=0.0 if closing else LISTS_SHARE,
            mixed=MIXED_SHARES[self.progress.level],
            listings=LISTINGS_SHARE,
        )
        return self.data.make(rows, length, LONGEST_POSITION, shares)

    def _train_step(self, batch: Batch) -> float:
        scale = learning_rate_scale(self.progress, self.plan.n_tokens)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.plan.learning_rate * scale
        ids, positions, classes = (
            each.to(self.device) for each in (batch.ids, batch.positions, batch.classes)
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.bf16):
            loss, right = self.step(ids, positions, classes)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(
            self.average, [each.detach() for each in self.model.parameters()], 0.02
        )
        self._count(batch, right)
        return float(loss.detach())

    def _count(self, batch: Batch, right: torch.Tensor) -> None:
        """Record the answers' exact match, by kind and age."""
        hits = right.cpu()
        scores = []
        for row, answers in enumerate(batch.answers):
            for start, end, kinds, age in answers:
                hit = float(hits[row, start - 1 : end - 1].all())
                if "bare" not in kinds[0]:
                    scores.append(hit)
                for kind in kinds:
                    self.recent[kind].append(hit)
                self.recent[f"age<{1 << age.bit_length()}"].append(hit)
        if scores and right.shape[1] >= LENGTHS[self.progress.level] - 1:
            mean = sum(scores) / len(scores)
            self.progress.accuracy += 0.05 * (mean - self.progress.accuracy)

    def _change_level(self) -> None:
        self.progress.steps_at_level += 1
        level = self.progress.level
        steps = self.progress.steps_at_level
        passed = steps >= 60 and (
            self.progress.accuracy > PASS_AT[level] or steps > MAX_STEPS[level]
        )
        if passed and self.progress.level + 1 < len(LENGTHS):
            self.progress.level += 1
            self.progress.steps_at_level = 0
            self.progress.accuracy = 0.8
            self.progress.passed_at_tokens.append(self.progress.tokens)

    def _report(self) -> None:
        means = {
            name: round(sum(each) / len(each), 3) for name, each in sorted(self.recent.items())
        }
        rate = round(self.progress.tokens / max(1.0, self.progress.seconds))
        length = LENGTHS[self.progress.level]
        minutes = self.progress.seconds / 60
        head = f"step {self.progress.step} {minutes:.1f} min length {length} {rate} tokens/s"
        print(f"{head} accuracy {self.progress.accuracy:.3f} {json.dumps(means)}", flush=True)
        self.recent.clear()

    def save(self) -> None:
        """Write the checkpoint, then the averaged weights as a model folder."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [each.state_dict() for each in self.optimizers],
            "progress": asdict(self.progress),
            "data": self.data.rng.getstate(),
        }
        unfinished = self.plan.folder / "checkpoint.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.plan.folder / "checkpoint.pt")
        self.export()

    def _resume(self) -> None:
        path = self.plan.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.data.rng.setstate(state["data"])

    def export(self) -> None:
        """Write the averaged weights in float32, the configuration and the tokenizer."""
        shipped = build_model(self.tokenizer)
        for target, source in zip(shipped.parameters(), self.average, strict=True):
            target.data.copy_(source.cpu())
        shipped.save_pretrained(self.plan.export)
        self.tokenizer.save_pretrained(self.plan.export)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million-tokens", type=float, default=30, help="length of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("reference/runs/main"), help="checkpoint folder"
    )
    parser.add_argument("--export", type=Path, default=MODEL_PATH, help="folder for the weights")
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="train one; else the shipped one is used"
    )
    parser.add_argument("--start-from", type=Path, help="model folder with the first weights")
    parser.add_argument("--level", type=int, default=0, help=f"first of the lengths {LENGTHS}")
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, help="its maximum, of both optimizers"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--save-seconds", type=float, default=180)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    parser.add_argument(
        "--bf16", action="store_true", help="for a GPU, or a CPU with instructions for bfloat16"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plan = Plan(
        given.folder,
        given.export,
        round(1e6 * given.million_tokens),
        given.batch_tokens,
        given.seed,
        not given.no_compile,
        given.bf16,
        None if given.new_tokenizer else MODEL_PATH,
        given.start_from,
        given.level,
        given.learning_rate,
    )
    Run(plan).train(given.save_seconds)


if __name__ == "__main__":
    main()
