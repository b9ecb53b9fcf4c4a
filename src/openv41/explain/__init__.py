"""What each component takes, gives, keeps and costs, from one source: the model itself, run without memory.

    recorder    what crosses the edges of the parts        scene     the released model, standing anywhere
    counting    operations that count instead of compute   ledger    parameters, by two published ways to add up
    components  where each part stands, and why            cost      FLOPs, bytes, floors, machines
    panel       all of it for one component in one call    render    text, rich, Markdown
    whatif      the same for a changed configuration       fit       does it fit, and how much more would

Nothing here is written down that the model could say itself.
"""

from openv41.explain.ledger import tree
from openv41.explain.panel import Panel, Question, explain

__all__ = ["Panel", "Question", "explain", "tree"]
