"""Parameters by component, from the modules as `openv41 explain` has them; bytes by part, from the files."""

from pathlib import Path
from typing import Any

from openv41.config import Config
from openv41.explain.ledger import checkpoint_tallies, tree


def measure(config: Config, folder: Path) -> dict[str, Any]:
    """Of a configuration, and of the model folder that holds it."""
    parts = {part: tally.to_dict() for part, tally in checkpoint_tallies(config).items() if tally.tensors}
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if is_shipped(path)}
    return {"parts": parts, "tree": flat(tree(config)), "files": files, "file_bytes": sum(files.values())}


def is_shipped(path: Path) -> bool:
    """Whether a file of a model folder is part of the model: configuration, tokenizer, weights and their index."""
    return path.name in ("config.json", "tokenizer.json", "tokenizer_config.json") or ".safetensors" in path.name


def flat(node: dict[str, Any], depth: int = 0, most: int = 2) -> list[dict[str, Any]]:
    """The tree, outermost first, down to its second level."""
    own = {"name": node["name"], "depth": depth, "instances": node["instances"], "parameters": node["parameters"]}
    inside = [one for part in node["inside"] for one in flat(part, depth + 1, most)] if depth < most else []
    return [own, *inside]


def table(found: dict[str, Any]) -> str:
    components = [
        f"| {'&nbsp;' * 4 * row['depth']}{row['name']} | {row['instances']} | {row['parameters']:,} |"
        for row in found["tree"]
    ]
    parts = [f"| {name} | {one['parameters']:,} | {one['bytes']:,} |" for name, one in found["parts"].items()]
    return "\n".join(
        [
            "| component | in how many places | parameters |", "|---|---|---|", *components, "",
            "| part | parameters | bytes of weights and scales |", "|---|---|---|", *parts, "",
            f"All files together have {found['file_bytes']:,} bytes, configuration and tokenizer included.",
        ]
    )  # fmt: skip
