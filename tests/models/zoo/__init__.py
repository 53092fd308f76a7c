"""The models, one a module, each written as its library's users write it.

`model()` is a factory: it returns a function and the arguments that it is called with. It is made
once a process, since most of its time goes into initializing parameters.
"""
