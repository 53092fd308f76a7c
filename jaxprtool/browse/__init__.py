"""The browser: a program on a full screen. What is shown and found is apart from the widgets.

`states.Recorder` keeps the states of a program that a pipeline is run on, and `app.browse` shows
them. The package stands on `jaxprtool.extend` and the public names alone, as a plug-in would.
"""
