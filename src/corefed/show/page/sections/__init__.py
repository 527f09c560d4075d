"""The parts of a page, one file each: from a run to a `content.Section`."""
