#!/usr/bin/env bash
# <layout>: <nodes> node(s) of <each>.
# <where> Words after it change the run: train.steps=1000 train.data=…
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
exec <start> "$@"
