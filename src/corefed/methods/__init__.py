"""One method a file; `registry` names them all."""
