"""One file for each group of cases: `run(case, ops, sheet)` tells the kind by its tensors and compares on the sheet."""
