"""Rules that bring the many spellings of one meaning to one form."""
