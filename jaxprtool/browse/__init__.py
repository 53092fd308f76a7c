"""The browser: a program on a full screen. What is shown and found is apart from the widgets."""
