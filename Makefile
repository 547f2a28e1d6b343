## make run TP=2 MODE=ssd      set up what is missing; run TP target ranks and DRAFTS draft ranks
## make probe TP=2             what this machine gives a pair of models: a table and a profile
## make test                   all tests         (ARGS="-k cache" goes to pytest)
## make test-mpi               only the tests that start mpirun
## make check                  ruff, mypy and the fast tests
## make venv                   only set up .venv
## make clean                  remove caches and build files; .venv and out/ stay
##
## Variables of run; only those that you give are passed on, the others keep mpissd's own defaults:
##   TP=1  DRAFTS=1 (0 for ar)  MODE=ssd|sd|ar  PAIR=8b/1b  WORKLOAD=gemm|markov
##   BACKEND=auto|numpy|cupy|emulated  DEVICE=h100|h200|a100-80|v100-32|null (emulated)
##   K=7  FANOUT=uniform:3|geometric:24|list:4,4,3  ALPHA=0.8  PHIT=0.9
##   BATCH=1  ROUNDS=200  SEED=0  OUT=out  ARGS="--lm_head …" (any other flag)
## PYTHON=…  use this interpreter as it is: no .venv, nothing is installed
## MPIRUN=…  use this mpirun (options allowed), and install none
##
## They count on make's command line. A TP, K, OUT or PYTHON in the environment is ignored; MPIRUN
## alone is also taken from there, since clusters set it.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: run probe test test-mpi check venv clean help

# What the user gave: $(value) keeps a $ in it as it is.
is_given = $(filter command file override,$(firstword $(origin $1)))
given = $(if $(is_given),$(value $1))
quote = '$(subst ','\'',$1)'
flag = $(if $(given),--$2=$(call quote,$(given)))

flag_of := MODE:mode DRAFTS:num_drafts PAIR:pair BACKEND:backend DEVICE:device WORKLOAD:workload \
    K:lookahead FANOUT:fan_out ALPHA:alpha PHIT:p_hit BATCH:batch_size ROUNDS:rounds SEED:seed \
    OUT:out
flags = $(foreach f,$(flag_of),$(call flag,$(word 1,$(subst :, ,$f)),$(word 2,$(subst :, ,$f))))

# A mistyped name would silently measure something else.
names := TP $(foreach f,$(flag_of),$(word 1,$(subst :, ,$f))) ARGS PYTHON MPIRUN
on_command_line = $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $v))),$v))
check_names = $(foreach v,$(filter-out $(names),$(on_command_line)),\
    $(error $v is no variable of run; they are: $(names)))

whole = $(if $(shell [[ $(call quote,$2) =~ ^$3$$ ]] || echo no),\
    $(error $1=$2: $1 is a whole number, $4),$2)
tp = $(call whole,TP,$(or $(call given,TP),1),[1-9][0-9]*,1 or more)
default_drafts = $(if $(filter ar,$(call given,MODE)),0,1)
drafts = $(call whole,DRAFTS,$(or $(call given,DRAFTS),$(default_drafts)),(0|[1-9][0-9]*),0 or more)
num_ranks = $(shell echo $$(($(tp) + $(drafts))))

python := $(call quote,$(or $(call given,PYTHON),.venv/bin/python))
setup := $(if $(call given,PYTHON),@:,@launch/setup.sh)

run:
	$(check_names)$(setup)
	@PYTHON=$(python) launch/local.sh $(num_ranks) $(flags) $(call given,ARGS)

probe:
	$(setup)
	@PYTHON=$(python) COMMAND=probe launch/local.sh $(shell echo $$(($(tp) + $(drafts)))) $(flags) $(call given,ARGS)

test:
	$(setup) test
	@$(python) -m pytest $(call given,ARGS) </dev/null

test-mpi:
	$(setup) test
	@$(python) -m pytest -m mpi $(call given,ARGS) </dev/null

check:
	$(setup) test
	@$(python) -m ruff check .
	@$(python) -m mypy
	@$(python) -m pytest -q -m "not mpi and not slow and not gpu" </dev/null

venv:
	$(setup)

clean:
	@rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

help:
	@sed -n 's/^## \{0,1\}//p' Makefile
