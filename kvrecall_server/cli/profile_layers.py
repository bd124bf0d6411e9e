"""`kvrecall profile-layers`: sensitivity of each layer to eviction, and the budgets it gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrecall_server.app.errors import BadCalibrationText, CannotServe
from kvrecall_server.app.models import check_model, resolve_model
from kvrecall_server.app.progress import show_progress
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.options import (
    MEASURED_BUDGET,
    Data,
    Dtype,
    Model,
    Quantize,
    build_settings,
)
from workers.errors import ModelRefused, ProfileRefused

if TYPE_CHECKING:
    from workers.model.layer_sensitivity import Profile


def profile_layers_command(
    model: Model = None,
    data: Data = None,
    text: Annotated[
        Path | None, typer.Option(help="Calibration text. Default: a packaged one.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text, at most the model's context.")
    ] = 2048,
    budget: Annotated[
        int, typer.Option(min=1, help="Budget whose split over the layers is shown, in mean rows.")
    ] = MEASURED_BUDGET,
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Measure the layers' sensitivity to eviction (EpiCache, section 3.2).

    The profile is written to the data directory, where the service reads it.
    """
    settings = build_settings(model=model, data=data, dtype=dtype, quantize=quantize)
    console = Console()
    with show_progress(f"measuring the layers of {settings.model}"):
        profile, path, splits = _profile(settings, text, tokens, budget)
    console.print(_heading(profile), highlight=False, soft_wrap=True)
    console.print(_table(profile, splits, budget))
    picture = path.with_suffix(".png")
    _draw(profile, splits, picture)
    for written in (path, picture):
        console.print(f"written: {written}", highlight=False, soft_wrap=True)


def _profile(
    settings: Settings, text: Path | None, tokens: int, budget: int
) -> tuple["Profile", Path, Mapping[str, tuple[int, ...]]]:
    """Measure and write the profile.

    Returns it, its file, and the rows of each layer under every way to split `budget`.
    Raises CannotServe, BadCalibrationText.
    """
    try:
        check_model(settings.model)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    # torch and transformers take seconds to import: other commands do without.
    import torch

    from kvrecall.domain.settings.session import LayerBudgets
    from kvrecall_server.app import calibration
    from workers.model import layer_sensitivity as profile
    from workers.model.loader import load_model
    from workers.model.tokenizer import load_tokenizer
    from workers.primitives.budgets import get_alpha, split_budget

    calibration_text = (
        calibration.read_text(text) if text else calibration.packaged_text(settings.model, tokens)
    )
    try:
        path = resolve_model(settings.model)
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        model = load_model(path, dtype, quantize=settings.quantize)
        tokenizer = load_tokenizer(path, model.eos_token_ids)
        measured = calibration.measure(model, tokenizer, settings.model, calibration_text, tokens)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    except ProfileRefused as error:
        raise BadCalibrationText(str(error)) from error
    file = calibration.profile_path(settings.data, model)
    profile.save(measured, file)
    ways: tuple[LayerBudgets, ...] = ("uniform", "pyramid", "sensitivity")
    floor = min(budget, settings.worker.min_budget)
    alpha = get_alpha(model.module.config.model_type)
    n_layers = model.shape.n_layers
    return (
        measured,
        file,
        {
            how: split_budget(
                budget, n_layers, how, floor=floor, weights=measured.sensitivity, alpha=alpha
            )
            for how in ways
        },
    )


def _heading(profile: "Profile") -> str:
    return (
        f"{profile.model}: {profile.compared} of {profile.tokens} tokens of {profile.text} "
        f"compared, with all rows and with {profile.budget} ({profile.sinks} sinks and the most "
        "recent)"
    )


def _table(profile: "Profile", splits: Mapping[str, tuple[int, ...]], budget: int) -> Table:
    table = Table(
        "layer",
        "s_l",
        *splits,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"rows of a budget of {budget}",
    )
    for column in table.columns:
        column.justify = "right"
    for layer, sensitivity in enumerate(profile.sensitivity):
        table.add_row(
            str(layer), f"{sensitivity:.4f}", *(str(rows[layer]) for rows in splits.values())
        )
    return table


def _draw(profile: "Profile", splits: Mapping[str, tuple[int, ...]], path: Path) -> None:
    # matplotlib takes a second to import.
    from kvrecall_server.reporting.figures import png
    from kvrecall_server.reporting.report_plots import layer_figure

    png(layer_figure(profile.sensitivity, splits), path)
