"""The models, one per module, each written as its library's users write it.

`model()` is a factory: it returns a function and its arguments. It is called once per process,
since initializing parameters takes most of its time.
"""
