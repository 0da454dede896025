"""Views: HTML and components made from values; nothing here reads files or starts anything."""
