"""The browser: a full-screen view of a program. Content and search do not depend on the widgets.

`states.Recorder` records the states of a program in a pipeline, and `app.browse` shows them. The
package depends only on `jaxprtool.extend` and public names, like a plug-in.
"""
