"""Pictures of rows: files and bytes checked, sized and opened. Pillow is imported only for rows that have pictures."""
