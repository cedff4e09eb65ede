"""What was rewritten, what was not and why: text tables made from the records of a run."""
