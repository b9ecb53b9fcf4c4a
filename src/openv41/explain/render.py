"""How a panel is shown: plain text, a panel of `rich` where that is installed and a person looks, or Markdown.

All three are made of the same sections, so none says more than another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openv41.explain.cost import KINDS
from openv41.explain.counting import FORMATS
from openv41.explain.panel import Panel

FORMAT_NAMES = {"fp4_fp8": "fp4 x fp8", "fp8": "fp8", "bf16": "bf16", "fp32": "fp32"}
KIND_NAMES = {
    "weights": "weights", "table": "looked-up rows", "state_read": "state read", "state_written": "state written",
    "activations": "activations",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A heading, rows of a table (the first may be headings), and lines of text below it."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    headed: bool = False
    text: Sequence[str] = ()


def title_of(panel: Panel) -> str:
    where = [] if panel.layer is None else [f"layer {panel.layer} ({panel.role})"]
    if panel.image is not None:
        call = f"an image of {panel.image['width']} x {panel.image['height']}"
    elif panel.mode == "decode":
        call = f"decode at position {panel.position:,}"
        call += f", {panel.tokens} tokens" if panel.tokens > 1 else ""
    else:
        call = f"prefill of {panel.tokens:,} tokens after {panel.position:,}"
    batch = f"batch {panel.batch}" if panel.batch > 1 else ""
    return " · ".join(filter(None, [panel.title, *where, call, batch]))


def sections_of(panel: Panel) -> list[Section]:
    sections = []
    if panel.image is not None:
        image = panel.image
        sections.append(
            Section(
                "image",
                [
                    ["resized to", f"{image['resized'][0]} x {image['resized'][1]} pixels"],
                    ["patches", f"{image['patches'][0]} rows x {image['patches'][1]}"],
                    ["cells", f"{image['cells'][0]} rows x {image['cells'][1]}"],
                    ["tokens in the prompt", f"{image['tokens']:,}"],
                ],
            )
        )
    for name, values in (("in", panel.inputs), ("out", panel.outputs)):
        if values:
            rows = [[value.name, _shape(value, panel.batch), value.dtype, ", ".join(value.axes)] for value in values]
            sections.append(Section(name, rows))
    sections += [_parameters(panel), *_state(panel), *_cost(panel)]
    if panel.what_if is not None:
        sections.append(_what_if(panel.what_if))
    sections.append(Section("why", text=[panel.why]))
    sections.append(Section("evidence", [row for one in panel.evidence for row in _evidence(one)]))
    sections.append(Section("taken for granted", text=[f"- {note}" for note in panel.notes]))
    return sections


def _shape(value: Any, batch: int) -> str:
    """The batch is called B unless one was asked for."""
    sizes = [
        "B" if axis == "batch" and batch == 1 else str(size) for size, axis in zip(value.shape, value.axes, strict=True)
    ]
    return f"[{', '.join(sizes)}]"


def _parameters(panel: Panel) -> Section:
    counted = panel.parameters
    rows = [[row["name"], f"{row['parameters']:,}"] for row in counted["rows"]]
    if len(rows) > 1 or len(counted["instances"]) > 1:
        rows.append(["together", f"{counted['per_instance']:,}"])
    text = []
    if counted["instances"]:
        layers = ", ".join(map(str, counted["instances"]))
        times = len(counted["instances"])
        text = [f"x {times} (layer{'s' if times > 1 else ''} {layers}) = {counted['total']:,}"]
    return Section("parameters", rows, text=text)


def _state(panel: Panel) -> list[Section]:
    if not panel.state:
        return []
    rows = [["", "kept by", "values", "bytes", "read", "written"]]
    text = []
    for one in panel.state:
        rows.append([one["name"], one["kept_by"], *(f"{one[key]:,}" for key in ("values", "bytes", "reads", "writes"))])
        if one.get("writes_slot") is not None and one["name"] in ("window", "draft"):
            text.append(
                f"{one['name']} ring: {one['held']} of {one['slots']} slots hold a position; "
                f"position {panel.position:,} goes to slot {panel.position:,} mod {one['slots']} = {one['writes_slot']}"
            )
    if panel.question.component == "model":
        grows = sum(one["bytes_per_token"] for one in panel.state)
        text.append(
            f"a token more is {grows:,.0f} bytes more; {sum(one['bytes'] for one in panel.state):,} bytes in all"
        )
    return [Section("state of a sequence", rows, True, text)]


def _cost(panel: Panel) -> list[Section]:
    cost = panel.cost
    flops = [[FORMAT_NAMES[key], f"{cost['flops'][key]:,}"] for key in FORMATS if cost["flops"][key]]
    nbytes = [[KIND_NAMES[key], f"{cost['bytes'][key]:,}"] for key in KINDS if cost["bytes"][key]]
    floor = (
        f"{cost['flops_per_byte']:,} FLOPs a byte; at least {_time(cost['floor_us'])} on {cost['machine']}, "
        f"bound by {cost['bound_by']}"
    )
    sections = [
        Section("FLOPs of the call", [*flops, ["total", f"{cost['flops']['total']:,}"]]),
        Section("bytes of the call", [*nbytes, ["total", f"{cost['bytes']['total']:,}"]], text=[floor]),
    ]
    if panel.parts:
        rows = [["", "FLOPs", "%", "bytes", "%", "floor alone"]]
        for part in panel.parts:
            rows.append(
                [
                    part["component"], f"{part['flops']['total']:,}", f"{100 * part['flops_share']:.2f}",
                    f"{part['bytes']['total']:,}", f"{100 * part['bytes_share']:.2f}", _time(part["floor_us"]),
                ]
            )  # fmt: skip
        sections.append(Section("by component", rows, True))
    return sections


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:,.4g} {unit}"
    return f"{microseconds:,.4g} us"


def _what_if(what_if: dict[str, Any]) -> Section:
    changes = ", ".join(f"{key}={value}" for key, value in what_if["changes"].items())
    if not what_if["differences"]:
        return Section("what if", text=[f"{changes}: nothing shown here changes"])
    rows = [["", "before", f"with {changes}", ""]]
    for one in what_if["differences"]:
        rows.append([one["what"], _number(one["before"]), _number(one["after"]), _change(one["before"], one["after"])])
    return Section("what if", rows, True)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else "-" if value is None else str(value)


def _change(before: Any, after: Any) -> str:
    if not isinstance(before, int | float) or not isinstance(after, int | float) or not before:
        return ""
    return f"{100 * (after / before - 1):+.2f} %"


def _evidence(one: dict[str, Any]) -> list[list[str]]:
    sources = [f"{source['file']}:{source['lines'][0]}-{source['lines'][1]}" for source in one["source"]]
    keys = ", ".join(f"{key}={_short(value)}" for key, value in one["keys"].items())
    lines = ["* " + one["statement"], *([f"  {keys}"] if keys else []), *(f"  {source}" for source in sources)]
    return [[line] for line in lines]


def _short(value: Any) -> str:
    text = "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Plain


def as_text(panel: Panel, width: int = 120) -> str:
    lines = [title_of(panel), "=" * min(width, len(title_of(panel)))]
    for section in sections_of(panel):
        lines += ["", section.title]
        lines += [f"  {line}" for line in columns(section.rows)]
        for text in section.text:
            lines += [f"  {line}" for line in _wrapped(text, width - 2)]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, numbers to the right; rows of one cell are lines of their own."""
    table = [row for row in rows if len(row) > 1]
    if not table:
        return [row[0] for row in rows]
    count = max(map(len, table))
    widths = [max((len(row[i]) for row in table if i < len(row)), default=0) for i in range(count)]
    right = [i > 0 and any(_numeric(row[i]) for row in table if i < len(row)) for i in range(count)]
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = [cell.rjust(widths[i]) if right[i] else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "+-" and cell[1:2].isdigit()


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width) or [""]


# Markdown


def as_markdown(panel: Panel) -> str:
    lines = [f"### {title_of(panel)}"]
    for section in sections_of(panel):
        lines += ["", f"**{section.title}**", ""]
        rows = [list(row) for row in section.rows]
        if rows and len(rows[0]) > 1:
            header = rows.pop(0) if section.headed else [""] * len(rows[0])
            lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
            lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
        else:
            lines += [f"- {_escaped(row[0].removeprefix('* ').strip())}" for row in rows]
        if section.text and rows:
            lines.append("")
        lines += list(section.text)
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def tree_as_text(tree: dict[str, Any], tallies: dict[str, Any]) -> str:
    """The tree of components, and the two ways to add up."""
    rows: list[list[str]] = []

    def walk(node: dict[str, Any], stem: str, branch: str) -> None:
        times = f"x {node['instances']}" if node["instances"] > 1 else ""
        rows.append([stem + branch + node["name"], f"{node['parameters']:,}", times, node["title"]])
        below = stem + {"": "", "├ ": "│ ", "└ ": "  "}[branch]
        for place, inner in enumerate(node["inside"]):
            walk(inner, below, "└ " if place == len(node["inside"]) - 1 else "├ ")

    walk(tree, "", "")
    return "\n".join([*_tree_columns(rows), "", *columns(tally_rows(tallies))])


def _tree_columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}".rstrip() for row in rows]


def tally_rows(tallies: dict[str, Any]) -> list[list[str]]:
    rows = [["as", "part", "parameters", "scales", "bytes", "tensors"]]
    for source, parts in tallies.items():
        for part, tally in parts.items():
            cells = (tally[key] for key in ("parameters", "scales", "bytes", "tensors"))
            rows.append([source, part, *(f"{cell:,}" for cell in cells)])
    return rows


# rich


def show(panel: Panel) -> None:
    """On the terminal, with `rich` if it is installed."""
    try:
        from rich.console import Console
    except ImportError:
        print(as_text(panel))
        return
    Console(highlight=False).print(as_rich(panel))


def as_rich(panel: Panel) -> Any:
    """A panel of `rich`. Raises ImportError where it is not installed."""
    from rich.console import Group
    from rich.panel import Panel as Frame
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for section in sections_of(panel):
        parts.append(Text(section.title, style="bold cyan"))
        rows = [list(row) for row in section.rows]
        if rows and len(rows[0]) > 1:
            table = Table(
                box=None, show_header=section.headed, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim"
            )
            body = rows[1:] if section.headed else rows
            for i in range(len(rows[0])):
                right = i > 0 and any(_numeric(row[i]) for row in body)
                heading = rows[0][i] if section.headed else ""
                table.add_column(
                    heading, justify="right" if right else "left", style="" if i else "bold", overflow="fold"
                )
            for row in body:
                table.add_row(*(Text(cell) for cell in row))
            parts.append(table)
        else:
            parts += [Text("  " + row[0], style="" if row[0].startswith("*") else "dim") for row in rows]
        parts += [Text("  " + text) for text in section.text]
        parts.append(Text(""))
    return Frame(Group(*parts[:-1]), title=title_of(panel), border_style="cyan", padding=(1, 2))
