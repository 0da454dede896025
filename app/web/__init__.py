"""Web server: access, limits and page filter."""
