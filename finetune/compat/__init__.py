"""All patches of other libraries, one module per library."""

# `tests/compat` fails when a library has renamed a patched name or no longer calls it. Each function imports its library when
# called.
