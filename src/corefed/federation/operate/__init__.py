"""What people who run a federation type, and the folders and processes behind it."""
