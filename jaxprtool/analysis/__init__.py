"""Facts about a Program, as data; nothing here prints."""
