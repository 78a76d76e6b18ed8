"""What only the course needs: drawings, widgets, the story, exercise checks, the notebooks' own tooling."""
