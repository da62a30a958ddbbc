"""Third-party packages, each in the file that bears its name."""
