"""Parity: is what this package computes what the published model computes?

Tensors recorded from the published code lie in a folder of golden cases. Read `folder` (what a case is), `compare`
(how near is near enough), `picks` (selections, and ties), `fill` (from tensors to modules), `groups/` (what is done
with each kind of case), `cases` (all of it run). `openv41 parity FOLDER` is the command.
"""

from openv41.parity.cases import GROUPS, Result, ops_named, run_cases, select
from openv41.parity.folder import Case, Folder, FolderError

__all__ = ["GROUPS", "Case", "Folder", "FolderError", "Result", "ops_named", "run_cases", "select"]
