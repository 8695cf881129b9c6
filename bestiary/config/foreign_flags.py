"""Flags of other programs and the Bestiary options that correspond to them, for hints about unknown options.

The programs are TorchBeast and its forks, pytorch-a2c-ppo-acktr and a fork with influence-aware memory,
Stable-Baselines3, CleanRL and RLlib. `bestiary/compat` translates whole command lines of TorchBeast and of the forks.

In the dicts, flags are written in lower case and with underscores. If several options correspond to a flag, they are
separated by " | ".
"""

from collections.abc import Collection

_TORCHBEAST = {
    "xpid": "--name",
    "savedir": "--run-dir",
    "mode": "the commands train, eval, video and look",
    "num_actors": "--num-envs | --actors",
    "num_servers": "--num-envs | --actors",
    "total_steps": "--steps",
    "unroll_length": "--rollout-length",
    "num_buffers": "--max-lag",
    "max_learner_queue_size": "--max-lag",
    "num_threads": "--learner-threads",
    "num_learner_threads": "--learner-threads",
    "num_inference_threads": "--actor-threads",
    "disable_cuda": "--device cpu",
    "disable_checkpoint": "--save-minutes",
    "use_lstm": "--memory lstm",
    "entropy_cost": "--algo.entropy-coef",
    "baseline_cost": "--algo.value-coef",
    "discounting": "--algo.discount",
    "reward_clipping": "--algo.reward-clipping",
    "learning_rate": "--lr",
    "alpha": "--algo.alpha",
    "momentum": "--algo.momentum",
    "epsilon": "--algo.eps",
    "grad_norm_clipping": "--algo.max-grad-norm",
    "use_popart": "--critic popart",
    "beta": "--critic.beta",
    "save_model_every_nsteps": "--save-every",
    "agent_type": "--agent | --torso",
    "frame_height": "--frame-size",
    "frame_width": "--frame-size",
    "aaa_input_format": "--gray | --frame-stack",
    "intermediate_model_id": "--checkpoint",
    "num_episodes": "--episodes",
    "actions": "--replay",
    "fuel_multiplier": "--reward fuel:N | --reward pacifist:N",
    "move_penalty": "--reward smooth:N | --reward center:N",
    "true_move_penalty": "--true-reward",
    "hidden_size": "--torso.width | --memory.hidden",
    "num_layers": "--torso.depth | --memory.layers",
    "first_frame": "--start",
    "num_frames": "--length",
    "saliencydir": "--out",
    "comp_num_models": "--points",
    "comp_between": "--between",
    "layer_index": "--draw",
    "plot_match_type": "--match",
}
_PROCGEN = {
    "multi_env": "several ENV, for example procgen/{bigfish,fruitbot}:easy",
    "distribution_mode": "the mode in the name of the environment, for example procgen/maze:easy",
    "num_levels": "--levels",
    "start_level": "--levels",
    "valid_num_levels": "--valid-levels",
    "valid_start_level": "--valid-levels",
    "valid_distribution_mode": "--valid-mode",
    "valid_num_episodes": "--valid-episodes",
    "validate_every": "--valid-every",
    "validate_step_every": "--valid-every",
    "test_num_levels": "--levels",
    "test_start_level": "--levels",
    "save_extra_checkpoint": "--keep-at",
    "test_model_name": "--checkpoint",
    "use_delta": "--memory delta",
    "use_psr": "--memory fake-sr",
    "use_sr": "--memory srwm",
    "use_smfwp": "--memory sr-delta",
    "use_no_carry_sr": "--memory srwm-no-carry",
    "test_no_carry_sr": "--reset-state-every",
    "use_deep_ff": "--torso.depth",
    "conv_scale": "--torso.channels",
    "num_head": "--memory.heads",
    "dim_head": "--memory.head-size",
    "dim_ff": "--memory.ff",
    "single_gpu": "--device",
    "use_wandb": "--wandb",
    "project_name": "--wandb",
    "job_name": "--name",
}
_A2C_PPO_ACKTR = {
    "env_name": "ENV without a flag, for example atari/Pong",
    "iam": "--agent iam",
    "recurrent_policy": "--memory gru",
    "gamma": "--algo.discount",
    "eps": "--algo.eps",
    "use_gae": "--algo.lam",
    "gae_lambda": "--algo.lam",
    "entropy_coef": "--algo.entropy-coef",
    "value_loss_coef": "--algo.value-coef",
    "max_grad_norm": "--algo.max-grad-norm",
    "num_processes": "--num-envs",
    "num_steps": "--rollout-length",
    "ppo_epoch": "--algo.epochs",
    "num_mini_batch": "--algo.minibatches",
    "clip_param": "--algo.clip",
    "log_interval": "--log-every",
    "save_interval": "--save-every",
    "eval_interval": "--valid-every",
    "num_env_steps": "--steps",
    "log_dir": "--run-dir",
    "save_dir": "--run-dir | --out",
    "no_cuda": "--device cpu",
    "use_linear_lr_decay": "--algo.lr-schedule linear",
    "cuda_deterministic": "--runtime serial",
}
_STABLE_BASELINES3 = {
    "total_timesteps": "--steps",
    "n_timesteps": "--steps",
    "n_envs": "--num-envs",
    "n_steps": "--rollout-length",
    "n_epochs": "--algo.epochs",
    "clip_range": "--algo.clip",
    "clip_range_vf": "--algo.value-clip",
    "ent_coef": "--algo.entropy-coef",
    "vf_coef": "--algo.value-coef",
    "normalize_advantage": "--algo.normalise-advantages",
    "target_kl": "--algo.target-kl",
    "net_arch": "--torso.sizes | --torso.width",
    "policy": "--torso | --agent",
    "tensorboard_log": "--tensorboard",
    "deterministic": "--greedy",
    "n_eval_episodes": "--episodes",
    "eval_freq": "--valid-every",
    "save_freq": "--save-every",
    "log_folder": "--run-dir",
}
_CLEANRL = {
    "env_id": "ENV without a flag, for example atari/Pong",
    "exp_name": "--name",
    "torch_deterministic": "--runtime serial",
    "cuda": "--device",
    "track": "--wandb",
    "wandb_project_name": "--wandb",
    "capture_video": "--video-at-end",
    "num_minibatches": "--algo.minibatches",
    "update_epochs": "--algo.epochs",
    "anneal_lr": "--algo.lr-schedule",
    "norm_adv": "--algo.normalise-advantages",
    "clip_coef": "--algo.clip",
    "clip_vloss": "--algo.value-clip",
    "num_eval_episodes": "--episodes",
    "eval_episodes": "--episodes",
}
_RLLIB = {
    "train_batch_size": "--batch-size | --rollout-length",
    "train_batch_size_per_learner": "--batch-size | --rollout-length",
    "minibatch_size": "--algo.minibatches",
    "sgd_minibatch_size": "--algo.minibatches",
    "num_epochs": "--algo.epochs",
    "num_sgd_iter": "--algo.epochs",
    "lambda": "--algo.lam",
    "lambda_": "--algo.lam",
    "entropy_coeff": "--algo.entropy-coef",
    "vf_loss_coeff": "--algo.value-coef",
    "vf_clip_param": "--algo.value-clip",
    "grad_clip": "--algo.max-grad-norm",
    "kl_target": "--algo.target-kl",
    "num_workers": "--actors | --num-envs",
    "num_rollout_workers": "--actors | --num-envs",
    "num_env_runners": "--actors | --num-envs",
    "num_envs_per_worker": "--num-envs",
    "num_envs_per_env_runner": "--num-envs",
    "num_learners": "--learners",
    "num_gpus": "--device cuda",
    "rollout_fragment_length": "--rollout-length",
    "fcnet_hiddens": "--torso.sizes | --torso.width",
    "lstm_cell_size": "--memory.hidden",
    "stop_timesteps": "--steps",
    "framestack": "--frame-stack",
    "evaluation_interval": "--valid-every",
    "evaluation_duration": "--valid-episodes | --episodes",
}

FOREIGN_FLAGS = {**_RLLIB, **_CLEANRL, **_STABLE_BASELINES3, **_A2C_PPO_ACKTR, **_PROCGEN, **_TORCHBEAST}


def foreign_flag_hint(flag: str, valid: Collection[str]) -> str:
    """Return a hint if `flag` is a flag of another program, otherwise an empty text.

    `valid` are the options of the current command. If none of the corresponding options is valid, the hint names these
    options and says that they do not exist here.
    """
    known = FOREIGN_FLAGS.get(flag.removeprefix("--").partition("=")[0].replace("-", "_").lower())
    if known is None:
        return ""
    options = known.split(" | ")
    usable = [option for option in options if not option.startswith("--") or option.split()[0] in valid]
    if usable:
        return f"; did you mean {' or '.join(usable)}?"
    return f"; it corresponds to {' or '.join(options)}, which does not exist with this command and these components"
