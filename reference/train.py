"""Train the reference model: `python -m reference.train --minutes 90`.

The sequence length increases whenever the exact match of the answers in new training conversations
passes a threshold. A stopped run resumes from its checkpoint. Needs no data: conversations are
generated during training.
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
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from reference import MODEL_PATH
from reference.data import ANSWER, ORDINARY, Batch, BatchMaker
from reference.tokenizer import MAX_TOKENS, train_tokenizer

LENGTHS = (192, 512, 1024, 2048, 4096, 8192)
# Exact match of the answers at which a run continues with the next length.
PASS_AT = (0.92, 0.93, 0.93, 0.93, 0.95, 1.0)
# Steps after which a run continues with the next length in any case.
MAX_STEPS = (10_000, 260, 260, 300, 400, 10_000)
SHORTER_SHARE = 0.2
LISTS_SHARE = 0.25
LONGEST_POSITION = 12_288
LANGUAGE_WEIGHT = 0.3
WARM_UP_STEPS = 50

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
    passed_at_seconds: list[float] = field(default_factory=list)


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """An untrained model of 2.5 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


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


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Build Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices = [
        each for name, each in model.named_parameters() if each.ndim == 2 and "layers" in name
    ]
    others = [
        each for name, each in model.named_parameters() if not (each.ndim == 2 and "layers" in name)
    ]
    return [
        torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_scale(progress: Progress, minutes: float) -> float:
    """Learning rate as a share of its maximum: warm-up, constant, linear decay in the last half."""
    warm = min(1.0, (progress.step + 1) / WARM_UP_STEPS)
    left = max(0.0, 1 - progress.seconds / (60 * minutes))
    return warm * min(1.0, 0.01 + 2 * left)


class Run:
    """One training run with its checkpoint folder."""

    def __init__(
        self, folder: Path, export: Path, minutes: float, seed: int, compiled: bool
    ) -> None:
        torch.manual_seed(seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.export_path = export
        self.minutes = minutes
        self.seed = seed
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = self._tokenizer()
        self.model = build_model(self.tokenizer)
        torch.nn.Module.to(self.model, self.device)
        self.average = [each.detach().clone() for each in self.model.parameters()]
        self.optimizers = build_optimizers(self.model)
        self.progress = Progress()
        self._resume()
        self.data = BatchMaker(self.tokenizer, seed + self.progress.step)
        self.step = step_function(self.model, compiled)
        self.recent: dict[str, list[float]] = defaultdict(list)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's tokenizer: trained at the start of the run, loaded when it is resumed."""
        folder = self.folder / "tokenizer"
        if not folder.exists():
            train_tokenizer().save_pretrained(folder)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer

    def train(self, batch_tokens: int, save_seconds: float) -> None:
        """Train until the time is over; save every `save_seconds`."""
        saved = self.progress.seconds
        while self.progress.seconds < 60 * self.minutes:
            started = time.monotonic()
            length = self._length()
            rows = max(1, batch_tokens // length)
            loss = self._train_step(self._batch(rows, length))
            self.progress.step += 1
            self.progress.tokens += rows * length
            self.progress.seconds += time.monotonic() - started
            self.recent["loss"].append(loss)
            if self.progress.step % 50 == 0:
                self._report()
            self._advance()
            if self.progress.seconds - saved > save_seconds:
                saved = self.progress.seconds
                self.save()
        self.save()

    def _length(self) -> int:
        """Length of the present level, sometimes a shorter one, so that it is not forgotten."""
        level = self.progress.level
        if level > 1 and self.data.rng.random() < (0.8 if self._closing() else SHORTER_SHARE):
            level = self.data.rng.randrange(1, level)
        return LENGTHS[level]

    def _closing(self) -> bool:
        """True if the last 6% of the time have begun: conversations of every length, no drills."""
        return self.progress.seconds > 0.94 * 60 * self.minutes

    def _batch(self, rows: int, length: int) -> Batch:
        first = self.progress.level == 0
        return self.data.make(
            rows,
            length,
            stretch=0.3 if first else 0.4,
            longest=LONGEST_POSITION,
            drills=0.0 if self._closing() else 0.15,
            lists=0.0 if self._closing() else LISTS_SHARE,
        )

    def _train_step(self, batch: Batch) -> float:
        scale = learning_rate_scale(self.progress, self.minutes)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * scale
        ids, positions, classes = (
            each.to(self.device) for each in (batch.ids, batch.positions, batch.classes)
        )
        with torch.autocast(self.device.type, torch.bfloat16):
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
            for start, end, kind, age in answers:
                hit = float(hits[row, start - 1 : end - 1].all())
                if "list" not in kind:
                    scores.append(hit)
                self.recent[kind].append(hit)
                self.recent[f"age<{1 << age.bit_length()}"].append(hit)
        if scores and right.shape[1] >= LENGTHS[self.progress.level] - 1:
            mean = sum(scores) / len(scores)
            self.progress.accuracy += 0.05 * (mean - self.progress.accuracy)

    def _advance(self) -> None:
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
            self.progress.passed_at_seconds.append(round(self.progress.seconds))
            self.save()

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
        }
        unfinished = self.folder / "checkpoint.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / "checkpoint.pt")
        self.export()

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def export(self) -> None:
        """Write the averaged weights in float32, the configuration and the tokenizer."""
        shipped = build_model(self.tokenizer)
        for target, source in zip(shipped.parameters(), self.average, strict=True):
            target.data.copy_(source.cpu())
        shipped.save_pretrained(self.export_path)
        self.tokenizer.save_pretrained(self.export_path)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=90, help="training time, compilation included"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("reference/runs/main"), help="checkpoint folder"
    )
    parser.add_argument("--export", type=Path, default=MODEL_PATH, help="folder for the weights")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--save-seconds", type=float, default=180)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run = Run(given.folder, given.export, given.minutes, given.seed, not given.no_compile)
    run.train(given.batch_tokens, given.save_seconds)


if __name__ == "__main__":
    main()
