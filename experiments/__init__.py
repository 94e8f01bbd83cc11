"""What people run: recipes, the pipeline from search to training, reports and the command line."""
