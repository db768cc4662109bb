"""The examples of a module whose library is not installed are left out."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchao") else ["src/gnmr/paths/float8.py", "src/gnmr/paths/_torchao.py"]
