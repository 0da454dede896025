"""What is replaced, overridden or called of other libraries behind their documented interfaces: one module for each library.

Each module has a row (`TOUCHED`) for every such name, and the functions that replace them. `tests/compat` fails when a library
has renamed one or looks it up no more. The libraries are imported when a function is called.
"""
