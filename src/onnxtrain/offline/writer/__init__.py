"""The artifact folder: its files, and how they appear all at once."""
