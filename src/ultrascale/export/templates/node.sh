#!/usr/bin/env bash
# Starts the processes of one node for <title>: <nodes> node(s) of <each>. <where>
# <needs>
set -euo pipefail
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export NODE_RANK="${NODE_RANK:-${PET_NODE_RANK:-0}}"
export MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:-localhost}}"
export MASTER_PORT="${MASTER_PORT:-${PET_MASTER_PORT:-<port>}}"
<start> "$@"
