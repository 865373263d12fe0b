"""The console: one page for people, and the JSON it reads. Everything here only looks."""
