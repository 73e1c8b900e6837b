"""Does Allfold name the culprit? Faults are injected, and what is reported is scored."""
