"""The chapters of the demo page, one file each."""
