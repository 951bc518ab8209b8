"""`teachllm spec`: what speculation does to the tokens, which is to be nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from teachllm_cli.bench_output import number, progress_bar
from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from teachllm.spec_decode.losslessness import Losslessness

spec = typer.Typer(name="spec", no_args_is_help=True, help="Look into speculative decoding.")

_BARS = " ▁▂▃▄▅▆▇█"


@spec.callback()
def _group() -> None:
    """Look into speculative decoding."""


@spec.command()
def check(
    samples: Annotated[int, typer.Option(help="Pairs of tokens that each rule draws.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the models and of the samples.")] = 0,
    rule: Annotated[
        list[str] | None, typer.Option(help="Only this rule; may be given several times. Default: all.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, where a kernel's reference samples, or cuda, where the kernel does.")
    ] = "cpu",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare what rejection sampling puts out with what the target alone would, on a vocabulary of 8 tokens.

    Tables stand in for the two models. Drafted, sampled and accepted is by the engine's own Sampler and DraftTree. Two
    rules are biased on purpose, to show that the comparison would see it.
    """
    with one_line_errors(debug=debug):
        from teachllm.spec_decode import losslessness

        names = rule or list(losslessness.RULES)
        for name in names:
            if name not in losslessness.RULES:
                raise ValueError(f"--rule {name}: choose among {', '.join(losslessness.RULES)}")
        found: list[losslessness.Losslessness] = []
        with progress_bar("rules") as progress:
            for name in names:
                progress(len(found), len(names))
                found.append(losslessness.check(losslessness.RULES[name], samples, seed, device))
        _show(found, device)
        wrong = [one for one in found if not one.is_as_claimed]
        if wrong:
            raise RuntimeError(". ".join(map(_complaint, wrong)))


def _show(found: Sequence[Losslessness], device: str) -> None:
    console = answers()
    for table in (_rules(found), _figures(found), _pictures(found)):
        console.print(table)
        console.print()
    sampled = "on a GPU the kernel" if device == "cuda" else "on a CPU the kernel's reference"
    console.print(
        "Compared are pairs of first tokens with the target's exact probabilities. The p-value says how often chance "
        "alone strays as far. The engine's rules are Sampler.draw_drafts, Sampler.sample "
        f"({sampled}) and DraftTree.walk; not the models, tree attention or how a batch is laid out.",
        style="dim",
    )


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 0, 0, 2))
    for column in columns:
        table.add_column(column)
    return table


def _rules(found: Sequence[Losslessness]) -> Table:
    table = _table("rule", "how it drafts and verifies")
    for one in found:
        table.add_row(one.rule.name, one.rule.about)
    return table


def _figures(found: Sequence[Losslessness]) -> Table:
    columns = ("samples", "accepted\nper step", "mean\nlength", "chi-square", "degrees of\nfreedom", "p-value")
    table = _table("rule", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found:
        table.add_row(
            one.rule.name,
            f"{one.num_samples:,}",
            f"{one.num_accepted / one.num_steps:.2f}",
            f"{one.mean_length:.2f}",
            number(one.chi_square),
            str(one.degrees_of_freedom),
            _p_value(one.p_value),
        )
    return table


def _pictures(found: Sequence[Losslessness]) -> Table:
    """Draw how likely each token of the vocabulary is to come first, a bar each, and the verdict."""
    from rich.text import Text

    table = _table("first token", "expected", "found", "verdict")
    for one in found:
        most = max(*one.expected, *one.found)
        verdict = "biased" if one.is_biased else "lossless as far as this can tell"
        style = "bold red" if not one.is_as_claimed else "green" if one.rule.is_lossless else "yellow"
        pictures = (_bars(one.expected, one, most), _bars(one.found, one, most))
        table.add_row(one.rule.name, *pictures, Text(verdict, style=style))
    return table


def _bars(shares: Sequence[float], one: Losslessness, most: float) -> Text:
    """In red where what was found is five standard errors away."""
    from rich.text import Text

    picture = Text()
    for share, expected, found in zip(shares, one.expected, one.found, strict=True):
        is_off = (found - expected) ** 2 * one.num_samples > 25 * expected * (1 - expected)
        picture.append(_BARS[max(round(share / most * 8), share > 0)], style="red" if is_off else "")
    return picture


def _p_value(p: float) -> str:
    return "< 1e-300" if p < 1e-300 else f"{p:.2g}"


def _complaint(one: Losslessness) -> str:
    if one.rule.is_lossless:
        return f"{one.rule.name} claims to be lossless, and is not: p-value {_p_value(one.p_value)}"
    return f"{one.rule.name} is biased, and {one.num_samples:,} samples do not show it: raise --samples"
