"""What is in a checkpoint, where each tensor goes, and whether everything is accounted for."""
