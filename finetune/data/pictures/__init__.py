"""Images of rows. Pillow is imported only for rows with images."""
