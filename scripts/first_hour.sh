#!/usr/bin/env bash
# A new user's way from a checkout to a server whose weights change, with the seconds of each step.
#   scripts/first_hour.sh WORK     WORK: an empty directory for the models and the server's state
# It makes .venv as `make demo` does, so a clean clone shows the installation too. The model is SmolLM2-135M.
set -euo pipefail
work="$(mkdir -p "$1" && cd "$1" && pwd)"
cd "$(dirname "$0")/.."
export HOTSWAP_STATE_DIR="$work/state" PATH="$PWD/.venv/bin:$PATH"
port=18400 url=http://127.0.0.1:18400 total=0

row() { printf '%6d.%d  %s\n' "$(($1 / 1000000))" "$(($1 / 100000 % 10))" "$2"; } # row MICROSECONDS WORDS

step() { # step WORDS COMMAND...: what it prints goes to WORK/log
    local words="$1" began ended
    shift
    began="${EPOCHREALTIME/./}"
    if ! "$@" >>"$work/log" 2>&1; then
        tail -n 40 "$work/log" >&2
        echo "first_hour: failed: $words" >&2
        exit 1
    fi
    ended="${EPOCHREALTIME/./}"
    row "$((ended - began))" "$words"
    total=$((total + ended - began))
}

serve() {
    hotswap up "$work/model" --name demo --port "$port" --max-model-len 512 >"$work/up.log" 2>&1 &
    server=$!
    until curl -sf "$url/readyz"; do
        kill -0 "$server" || { cat "$work/up.log"; return 1; }
        sleep 0.2
    done
}
stop() { kill -TERM "$server" && wait "$server"; }
trap '[ -z "${server:-}" ] || kill -TERM "$server" 2>/dev/null || true' EXIT

answer() { curl -sf "$url/generate" -d '{"prompt": "Once upon a time", "max_tokens": 16, "stream": false}'; }
sdk() {
    python - <<PYTHON
import openai
client = openai.OpenAI(base_url="$url/v1", api_key="-")
chat = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=16)
print(chat.choices[0].message.content)
PYTHON
}
train() { # the loop of the README, with a change in place of a training step
    python - <<PYTHON
import torch, weightsync
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("$work/model", dtype=torch.bfloat16)
with weightsync.Publisher(model="demo") as publisher:
    for step in range(3):
        with torch.no_grad():
            model.model.norm.weight += 0.01
        print(publisher.publish(model.state_dict(), step=step))
PYTHON
}

step "install what serving and training need" make .venv/.run
step "install the model, and the SDK that asks the server" make .venv/.real .venv/.test
step "write the model's directory" python -m loadtest.models.smollm "$work/model"
step "hotswap doctor" hotswap doctor
step "hotswap up, until it is ready" serve
step "the first answer" answer
step "an answer to the openai SDK" sdk
step "hotswap weights push" hotswap weights push "$work/model"
step "three steps of a training loop that publishes" train
step "hotswap weights rollback" hotswap weights rollback --reason "try it"
step "stop the server" stop
step "start again, from shared memory" serve
step "an answer" answer
step "stop" stop
row "$total" "in all"
