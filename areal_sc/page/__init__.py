"""The page that shows runs in a browser: it reads their folders, and changes none."""
