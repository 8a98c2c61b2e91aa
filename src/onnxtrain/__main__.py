"""`python -m onnxtrain` is the command `onnxtrain`."""

import sys

from onnxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
