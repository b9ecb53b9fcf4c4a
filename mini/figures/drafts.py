"""What the model's own draft brings: tokens a round of decoding, on held-out prompts continued greedily."""

from collections.abc import Sequence
from typing import Any

from openv41.api import Assistant
from openv41.texts import Prompt


def measure(assistant: Assistant, prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """All prompts as one batch, the longest draft in every round."""
    most = assistant.config.dspark_block_size
    given = [Prompt(prompt, stream=place, max_new_tokens=tokens) for place, prompt in enumerate(prompts)]
    stream = assistant.stream(given, draft=most)
    for _ in stream:
        pass
    assert stream.generation.speculation is not None
    tally = stream.generation.speculation.tally
    return {
        "prompts": len(prompts), "new_tokens": sum(one.tokens for one in stream.completions), "most": most,
        "rounds": tally.rounds, "tokens_per_round": 1 + sum(tally.accepted) / tally.rounds,
        "acceptance": tally.acceptance,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    rates = ["-" if rate is None else f"{rate:.2f}" for rate in found["acceptance"]]
    head = "| tokens a round | " + " | ".join(f"place {place}" for place in range(1, len(rates) + 1)) + " |"
    cells = f"| {found['tokens_per_round']:.2f} | " + " | ".join(rates) + " |"
    return "\n".join([head, "|---" * (1 + len(rates)) + "|", cells])
