# SPDX-License-Identifier: Apache-2.0
"""`doctor`: is this vLLM one we know, would the plugin be in effect, and what could DCP do for a given model?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_dcp_hybrid import __version__, activation
from vllm_dcp_hybrid.cli.diagnosis import APPLIES, OTHER_RELEASE, Diagnosis, PatchFinding, diagnose
from vllm_dcp_hybrid.cli.installed import INSTALL_HINT
from vllm_dcp_hybrid.cli.machine import MIB
from vllm_dcp_hybrid.cli.model_shape import ModelShape, UnreadableModel, layer_placement, read_model_shape
from vllm_dcp_hybrid.declarations import ERAS


def run_doctor(
    model: Path | None,
    *,
    tp_size: int | None,
    dcp_size: int | None,
    with_all: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Print the findings; `with_all`: also patches for other releases, and every difference.

    Returns:
        The exit status: 0 all well, 1 the plugin would not be in effect or the sizes are illegal, 2 no vLLM or a model
        that cannot be read.
    """
    diagnosis = diagnose()
    status = diagnosis.exit_status
    advice: dict[str, Any] | None = None
    if model is not None:
        try:
            shape = read_model_shape(model)
        except UnreadableModel as error:
            console.print(f"doctor: {error}", style="red", highlight=False)
            return 2
        advice = advise(shape, tp_size, dcp_size)
        status = status or (1 if any(row["illegal_because"] for row in advice["sizes"]) else 0)
    if as_json:
        # Not through the console, which would wrap lines.
        print(json.dumps({**as_document(diagnosis, with_all), "model": advice, "exit_status": status}, indent=2))
        return status
    print_diagnosis(diagnosis, with_all, console)
    if advice is not None:
        print_advice(advice, console)
    return status


def as_document(diagnosis: Diagnosis, with_all: bool) -> dict[str, Any]:
    """The findings as JSON types."""
    vllm = diagnosis.vllm
    return {
        "plugin": {
            "version": __version__,
            "entry_point": diagnosis.entry_point,
            "vllm_plugins": diagnosis.allowed_plugins,
            "is_switched_off": diagnosis.is_switched_off,
        },
        "vllm": vllm and {**asdict(vllm), "root": str(vllm.root), "has_vllm_command": vllm.has_vllm_command},
        "release_file": diagnosis.release_file and str(diagnosis.release_file),
        "known_releases": list(diagnosis.known_releases),
        "era": diagnosis.era and {"name": diagnosis.era.name, "does": diagnosis.era.does},
        "would_be_applied": not diagnosis.reasons,
        "reasons": list(diagnosis.reasons),
        "num_differences": diagnosis.num_differences,
        "patches": [asdict(finding) for finding in _shown_patches(diagnosis, with_all)],
        "machine": asdict(diagnosis.machine),
        "refused": [asdict(refusal) for refusal in diagnosis.refused],
    }


def advise(shape: ModelShape, tp_size: int | None, dcp_size: int | None) -> dict[str, Any]:
    """What DCP could be for this model, as JSON types.

    Without sizes, every tensor-parallel size up to 8 is listed with its largest legal DCP size.
    """
    tp_sizes = [tp_size] if tp_size is not None else [1, 2, 4, 8]
    rows = []
    for tp in tp_sizes:
        largest = shape.largest_dcp_world_size(tp)
        asked = dcp_size if dcp_size is not None else largest
        rows.append(
            {
                "tensor_parallel_size": tp,
                "decode_context_parallel_size": asked,
                "largest_legal": largest,
                # Rows that nobody asked for are no reason to fail.
                "illegal_because": shape.illegal_because(tp, asked) if tp_size is not None else None,
                "bytes_per_token_and_rank": {
                    str(size): shape.attention_bytes_per_token(tp, size) for size in sorted({1, asked})
                },
            }
        )
    return {
        "architecture": shape.architecture,
        "is_hybrid": shape.is_hybrid,
        "is_mla": shape.is_mla,
        "num_query_heads": shape.num_query_heads,
        "num_kv_heads": shape.num_kv_heads,
        "layers": [{"kind": word, "count": count, "placement": layer_placement(word)} for word, count in shape.layers],
        "sizes": rows,
    }


def print_diagnosis(diagnosis: Diagnosis, with_all: bool, console: Console) -> None:
    """The findings for a human, worst news last."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(diagnosis):
        facts.add_row(name, Text(value))
    console.print(facts)

    shown = _shown_patches(diagnosis, with_all)
    if diagnosis.vllm is not None and shown:
        console.print("\nPatches, in the order in which they are applied", style="bold")
        for finding in shown:
            _print_patch(finding, console)

    acts_on = (diagnosis.era or ERAS[0]).acts_on
    console.print(f"\nRefused with {acts_on}, before the weights load", style="bold", highlight=False)
    refused = Table.grid(padding=(0, 2))
    refused.add_column(width=26)
    refused.add_column(overflow="fold")
    for refusal in diagnosis.refused:
        refused.add_row(refusal.what, Text.assemble(refusal.why, (f"; {refusal.remedy}", "dim")))
    console.print(Padding(refused, (0, 0, 0, 2)), "")

    if not diagnosis.reasons:
        console.print("All well: the plugin would be in effect.", style="bold green")
        return
    console.print("The plugin would not be in effect:", style="bold red")
    for reason in _shown_reasons(diagnosis, with_all):
        console.print(Padding(Text(f"- {reason}"), (0, 0, 0, 2)))
    if diagnosis.vllm is None:
        console.print(Padding(Text(INSTALL_HINT), (0, 0, 0, 4)))


def _shown_patches(diagnosis: Diagnosis, with_all: bool) -> list[PatchFinding]:
    return [finding for finding in diagnosis.patches if with_all or finding.state != OTHER_RELEASE]


def _shown_reasons(diagnosis: Diagnosis, with_all: bool) -> list[str]:
    """Of many differences, the first: one is enough to apply nothing."""
    num = diagnosis.num_differences
    if num == 0 or diagnosis.vllm is None:
        return list(diagnosis.reasons)
    shown = num if with_all else 1
    first = f"This vLLM says that it is {diagnosis.vllm.version}, and is not the stock release. {diagnosis.reasons[0]}"
    more = [f"{num - shown} more such differences (--all lists them)."] if num > shown else []
    return [first, *diagnosis.reasons[1:shown], *more, *diagnosis.reasons[num:]]


def _print_patch(finding: PatchFinding, console: Console) -> None:
    state = "does not fit" if finding.state.endswith(".") else finding.state
    if state == OTHER_RELEASE:
        state = f"for vLLM {finding.releases}"
    console.print(
        Text.assemble(f"  {finding.name}  ", (state, {APPLIES: "green", "does not fit": "red"}.get(state, "dim")))
    )
    console.print(Padding(Text(f"{finding.how}s {finding.target}", "dim", overflow="fold"), (0, 0, 0, 4)))


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    vllm, machine = diagnosis.vllm, diagnosis.machine
    allowed = diagnosis.allowed_plugins
    facts = [("plugin", f"vllm-dcp-hybrid {__version__}")]
    if vllm is None:
        facts.append(("vLLM", "none"))
    else:
        build = "CPU build" if vllm.is_cpu_build else "GPU build"
        facts.append(("vLLM", f"{vllm.version}, {build}, {vllm.root}"))
        none = f"none for this release in {diagnosis.release_dir}"
        if diagnosis.era is not None:
            facts.append(("on this release", f"{diagnosis.era.does} ({diagnosis.era.name})"))
        facts.append(("release file", str(diagnosis.release_file or none)))
        if not vllm.has_vllm_command:
            facts.append(
                (
                    "vllm command",
                    "cannot start: stock reads the metadata of a distribution named vllm, and this one is "
                    f"{vllm.distribution}. Use `python -m vllm_dcp_hybrid.cli.stock serve M ...`, which runs stock's "
                    "command with that question answered.",
                )
            )
    facts += [
        ("known releases", ", ".join(diagnosis.known_releases) or "none"),
        ("entry point", diagnosis.entry_point or "not registered"),
        ("VLLM_PLUGINS", "not set: all plugins are loaded" if allowed is None else ",".join(allowed)),
        (activation.KILL_SWITCH, "off: the plugin does nothing" if diagnosis.is_switched_off else "on"),
        ("GPUs", ", ".join(machine.gpus) or "none"),
        ("cores", f"{machine.num_cores} on {machine.num_numa_nodes} NUMA node(s)"),
        ("/dev/shm", f"{machine.shm_free // MIB:,} MiB free of {machine.shm_total // MIB:,}"),
    ]
    return facts


def print_advice(advice: dict[str, Any], console: Console) -> None:
    """What `advise` found, for a human."""
    heads = "MLA, one latent KV head" if advice["is_mla"] else f"{advice['num_kv_heads']} KV heads"
    console.print(
        f"\n[bold]{advice['architecture']}[/]: {advice['num_query_heads']} query heads, {heads}", highlight=False
    )
    if not advice["is_hybrid"]:
        console.print(
            "No recurrent layers that this command knows: unless vLLM finds it hybrid, the plugin stays dormant.",
            highlight=False,
        )
    layers = Table("layers", "kind", "under DCP", show_edge=False)
    for row in advice["layers"]:
        layers.add_row(str(row["count"]), row["kind"], row["placement"])
    sizes = Table("TP", "largest DCP", "asked", "KV bytes per token and rank", "verdict", show_edge=False)
    for row in advice["sizes"]:
        kv = row["bytes_per_token_and_rank"]
        known = ", ".join(f"{value:,.0f} (DCP {size})" for size, value in kv.items() if value is not None)
        verdict = "illegal" if row["illegal_because"] else "legal"
        asked = str(row["decode_context_parallel_size"])
        sizes.add_row(str(row["tensor_parallel_size"]), str(row["largest_legal"]), asked, known or "?", verdict)
    console.print("", layers, "", sizes, sep="\n")
    for row in advice["sizes"]:
        if row["illegal_because"]:
            console.print(f"\n{row['illegal_because']}", style="bold red", highlight=False)
