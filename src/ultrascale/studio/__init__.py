"""The studio: a local web page to plan with, look at schedules, runs and accuracy. Python only, on NiceGUI."""
