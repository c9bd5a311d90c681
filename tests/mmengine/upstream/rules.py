"""How MMEngine's tests are translated: every rule with its reason. What a test means is still checked afterwards."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import NamedTuple


class Rule(NamedTuple):
    """``old`` (a regular expression, also over several lines) becomes ``new`` in the files of the pattern."""

    files: str
    old: str
    new: str
    why: str


CASE = "runner_test_case.py"

# fmt: off
IMPORTS = [
    Rule("*", r"\bmmengine\b(?=[.\s]|$)", "mmx", "imports: mmx has MMEngine's modules with flextrain's names"),
    Rule("*", r"(epoch_[\w{}]+|iter_[\w{}]+|best_[\w{}/]+|latest)\.pth", r"\1", "checkpoints are directories"),
    Rule("*", r" +\w+\._instance_dict\.clear\(\)\n", "", "there are no global instances to clear"),
    Rule("*", r"mmx.hooks.profiler_hook.check_kineto\(\)", "True", "every torch that flextrain supports has kineto"),
    Rule(CASE, r"logging\.shutdown\(\)", "bridge.close_logger()", "closes log files"),
]

SCHEDULERS = [
    Rule("*_scheduler.py", r"param_group\[param_name\]", "bridge.momentum(param_group, param_name)", "Adam's betas change"),
    Rule("*_scheduler.py", r"construct2\(\)", "construct()", "a scheduler's settings are the configuration's, not the state's"),
    Rule("*_scheduler.py", r"(OneCycleParamScheduler\(\s+self.optimizer,)(?![^)]*eta_max)", r"\1 eta_max=1,", "eta_max is needed"),
    Rule("*_scheduler.py", r"self.assertWarnsRegex\(UserWarning, r'how-to-adjust-learning-rate',\s+([\w.]+)\)", r"with self.assertLogs('flextrain', 'WARNING') as told:\n            \1()\n        self.assertIn('before the optimizer', told.output[0])", "warnings are logged"),
    Rule("test_param_scheduler.py", r"            if isinstance\(scheduler.optimizer, OptimWrapper\) (.|\n)*?result.pop\(\)\n", "", "an OptimWrapper has the groups of its optimizer, and none for a base value"),
]

CONSTRUCTORS = [
    Rule("*", r"\boptim_constructor\(", "bridge.Constructed(optim_constructor, ", "a constructor makes groups, the strategy the optimizer"),
    Rule("test_optimizer.py", r"\bbuild_optim_wrapper\((self\.)?model, ", r"bridge.build_optim_wrapper(\1model, ", "the same"),
    Rule("test_optimizer.py", r"from mmx.optim.optimizer.builder import \((.|\n)*?\)\n", "", "lists of names: the registry has them"),
    Rule("test_optimizer.py", r"\b(TORCH|TRANSFORMERS|LION|DADAPTATION|BITSANDBYTES)_OPTIMIZERS", "OPTIMIZERS", "the same"),
    Rule("test_optimizer.py", r"Registry\(\s*'custom optimizer', scope='custom optimizer', parent=OPTIMIZERS\)", "OPTIMIZERS", "names are global"),
    Rule("test_optimizer.py", r"with DefaultScope.overwrite_default_scope\('custom optimizer'\):", "if True:", "names are global"),
    Rule("test_optimizer.py", r"OPTIMIZERS.children.pop\('custom optimizer'\)", "OPTIMIZERS.module_dict.pop('CustomOptimizer')", "names are global"),
    Rule("test_optimizer.py", r"        with self.assertRaisesRegex\(\s+ValueError,\s+'some parameters appear in more(.|\n)*?\n\n", "", "a parameter with several names is trained once; bypass_duplicate is needed where their settings differ"),
    Rule("test_optimizer.py", r"with self.assertLogs\(MMLogger.get_current_instance\(\), level='WARNING'\):\n +# Warning should be raised since conv3.0", r"if True:\n            # conv3.0", "a parameter with several names is no reason for a warning"),
]

WRAPPERS = [
    Rule("test_optimizer_wrapper.py", r"class TestOptimWrapper\(MultiProcessTestCase\)", "class TestOptimWrapper(TestCase)", "no test but one needs processes"),
    Rule("test_optimizer_wrapper.py", r"        super\(\).setUp\(\)\n        self._spawn_processes\(\)\n\n    def run_test\(self, test_name: str, parent_pipe\) -> None:\n", "", "the same"),
    Rule("test_optimizer_wrapper.py", r"        super\(\).run_test\(test_name, parent_pipe\)\n", "", "the same"),
    Rule("test_optimizer_wrapper.py", r"    @unittest.skipIf\(True, reason='Solved in the future'\)\n", "", "skipped there because of its processes"),
    Rule("test_optimizer_wrapper.py", r"optim_wrapper\._accumulative_counts", "optim_wrapper.accumulate", "has a public name"),
    Rule("test_optimizer_wrapper.py", r" +self.assertEqual\(optim_wrapper\._(max|remainder)_counts, [-1]+\)\n", "", "counters of its own"),
    Rule("test_optimizer_wrapper.py", r"self.assertEqual\(optim_wrapper\._inner_count, 0\)", "self.assertFalse(optim_wrapper.should_update() and optim_wrapper.accumulate > 1)", "counters of its own"),
    Rule("test_optimizer_wrapper.py", r" +self.assertIs\(optim_wrapper.message_hub, self.message_hub\)\n", "", "the gradient norm is given to the runner, which logs it"),
    Rule("test_optimizer_wrapper.py", "optim_wrapper.clip_grad_kwargs", "optim_wrapper.clip_grad", "has another name"),
    Rule("test_optimizer_wrapper.py", r"not torch.cuda.is_available\(\),\n( +)reason='`torch.amp`", r"False,\n\1reason='`torch.amp`", "AMP also works on the CPU"),
    Rule("test_optimizer_wrapper.py", r"(?<=1, 1, 1, 1\))\.cuda\(\)|(?<=self.model)\.cuda\(\)(?=\n        (amp|#))|(?<=Conv2d\(1, 1, 1\))\.cuda\(\)", "", "AMP also works on the CPU"),
    Rule("test_optimizer_wrapper.py", r"torch.cuda.is_bf16_supported\(\)\)", "True)", "AMP also works on the CPU"),
    Rule("test_optimizer_wrapper.py", r"MagicMock\(spec=Optimizer\)\n +optimizer.defaults = \{\n +\}.*\n +optimizer.param_groups = \[\{\}\]", "bridge.watched(self.optimizer)", "an optimizer is one of torch's"),
    Rule("test_optimizer_wrapper.py", "torch.float16 if dtype is None", "torch.get_autocast_dtype('cpu') if dtype is None", "AMP also works on the CPU"),
    Rule("test_optimizer_wrapper.py", r"optim_wrapper._clip_grad\(\)", "optim_wrapper.step()", "clipping is a part of the update"),
    Rule("test_optimizer_wrapper.py", r" +(log_scalars = self.message_hub.log_scalars|self.message_hub._log_scalars.clear\(\))\n", "", "the gradient norm is given to the runner, which logs it"),
    Rule("test_optimizer_wrapper.py", r"assertIn\('train/grad_norm', log_scalars\)", "assertIsNotNone(optim_wrapper.last_step.grad_norm)", "the same"),
    Rule("test_optimizer_wrapper.py", r"assertNotIn\('train/grad_norm', log_scalars\)", "assertIsNone(optim_wrapper.last_step.grad_norm)", "the same"),
    Rule("test_optimizer_wrapper.py", r" +(optim_wrapper._inner_count = 99|self.assertEqual\(optim_wrapper._inner_count, 2.\)|optim_wrapper._inner_count \+= 1)\n", "", "counters of its own"),
    Rule("test_optimizer_wrapper.py", r"dict\(base_lr=\[0.1\], lr=\[0.1 \* 0.1\] \+ \[0.1\] \* 5\)", "dict(lr=[0.1 * 0.1, 0.1])", "equal settings share a group, and there is no base_lr"),
    Rule("test_optimizer_wrapper.py", r"AmpOptimWrapper\((\s*)'dynamic', ", r"AmpOptimWrapper(\1loss_scale='dynamic', ", "optimizer is the first argument"),
    Rule("test_optimizer_wrapper.py", r"AmpOptimWrapper\((\s*)dict\(init_scale=1, growth_factor=2\), ", r"AmpOptimWrapper(\1dtype='float16', loss_scale=dict(init_scale=1, growth_factor=2), ", "the same; the CPU's default is bfloat16"),
    Rule("test_optimizer_wrapper.py", r"(self\.assertIsInstance\(amp_optim_wrapper.loss_scaler, GradScaler\))(?=\n\n +# Test with dynamic)", r"amp_optim_wrapper = AmpOptimWrapper(optimizer=self.optimizer, dtype='float16')\n        \1", "the CPU's default is bfloat16, which needs no loss scale"),
    Rule("test_optimizer_wrapper.py", r"loss_scale='dynamic', optimizer=self.optimizer\)", "loss_scale='dynamic', optimizer=self.optimizer, dtype='float16')", "the same"),
    Rule("test_optimizer_wrapper.py", r" +self.assertIsNone\(amp_optim_wrapper._scale_update_param\)\n", "", "a private attribute"),
    Rule("test_optimizer_wrapper.py", r"(amp_optim_wrapper_? = AmpOptimWrapper\(\s*optimizer=(?:self.optimizer|SGD\(self.model.parameters\(\), lr=0.1\)))\)(?=\n +(loss = self.model\(torch.Tensor|self.model = self.model|amp_optim_wrapper_))", r"\1, dtype='float16')", "the CPU's default is bfloat16"),
    Rule("test_optimizer.py", r"== len\(model_parameters\) - 1 == num_params - 1", "== len(model_parameters) == num_params", "a frozen parameter is in a group, for when it is thawed"),
    Rule("test_optimizer.py", "model_params", "params", "the first argument of an optimizer is called params"),
    Rule("test_optimizer.py", "'Optimizer', ", "", "the base class is no optimizer"),
    Rule("test_optimizer_wrapper_dict.py", r"optim_wrapper_dict.param_groups\['(\w+)'\]", r"optim_wrapper_dict['\1'].param_groups", "param_groups is one list"),
    Rule("test_optimizer_wrapper_dict.py", r"'name: (\w+)'", r"'\1='", "another form of text"),
]

SAMPLERS = [
    Rule("test_sampler.py", r"@patch\('mmx.dataset.sampler.get_dist_info', return_value=\((\d), (\d)\)\)", r"@patch.object(bridge.Topology, 'shard', (\1, \2))", "the topology says which shard"),
    Rule("test_sampler.py", r"    @patch\('mmx.dataset.sampler.sync_random_seed', return_value=7\)\n", "", "without a seed the order is that of seed 0"),
    Rule("test_sampler.py", "sampler.seed, 7", "sampler.seed, 0", "the same; a runner gives its own seed"),
    Rule("test_sampler.py", r"\(self, mock(1, mock2)?\)", "(self)", "the topology says which shard"),
    Rule("test_sampler.py", r"sampler\.world_size", "sampler.count", "data shards, which need not be processes"),
    Rule("test_sampler.py", r"sampler\.rank", "sampler.index", "the same"),
    Rule("test_sampler.py", r"sampler\.size", "sampler.num_samples", "num_samples is the size of the dataset"),
    Rule("test_sampler.py", r"(sampler.total_size, )sampler.num_samples \* 3", r"\1len(sampler) * 3", "the same"),
    Rule("test_sampler.py", r"sampler\.num_samples,\s+(self.data_length\)|np.ceil)", r"len(sampler), \1", "the same"),
    Rule("test_sampler.py", r"len\(sampler\), sampler.num_samples\)", "len(sampler), len(list(sampler)))", "the same"),
    Rule("test_sampler.py", r"resumed\.skip\(skip\)", "resumed.set_span(skip * resumed.count)", "positions count the samples of all shards"),
]

MESSAGE_HUB = [
    Rule("test_message_hub.py", r"message_hub\._resumed_keys\['a'\]", "'a' in message_hub.state_dict()['info']", "the state says what is resumed"),
    Rule("test_message_hub.py", r"message_hub\._resumed_keys\['b'\]", "'b' in message_hub.state_dict()['info']", "the same"),
    Rule("test_message_hub.py", r"state_dict\['log_scalars'\]\['loss'\].data == \(np.array\(\[0.1\]\),\s+np.array\(\[1\]\)\)", "state_dict['scalars']['loss'] == dict(values=[0.1], counts=[1])", "the state has plain values"),
    Rule("test_message_hub.py", r"state_dict\['log_scalars'\]", "state_dict['scalars']", "the state has other keys"),
    Rule("test_message_hub.py", r"state_dict\['runtime_info'\]", "state_dict['info']", "the state has other keys"),
    Rule("test_message_hub.py", r" +(no_copy = NoDeepCopy\(\)|message_hub.update_info\('no_copy'.*|assert .*is no_copy)\n", "", "only plain values are saved"),
    Rule("test_message_hub.py", r"        # Test resume custom state_dict(.|\n)*?b=True, c=True, e=False\)\n", "", "a state is one that a hub has made"),
    Rule("test_message_hub.py", r"MessageHub._instance_dict = OrderedDict\(\)", "__import__('gc').collect()", "a hub that nobody holds is gone"),
    Rule("test_message_hub.py", r"id\(MessageHub.get_instance\('mmengine'\)\)", "id(MessageHub.get_instance(message_hub.instance_name))", "the first has another name"),
    Rule("test_message_hub.py", r"        (MessageHub.get_instance\('mmdet'\))", r"        hub = \1; assert hub", "a hub that nobody holds is gone"),
    Rule("test_history_buffer.py", r"HistoryBuffer\(\)", "HistoryBuffer(max_length=1000000)", "without max_length all values are kept"),
    Rule("test_history_buffer.py", r"HistoryBuffer\((logs, counts|max_array, max_count)\)", r"HistoryBuffer(\1, max_length=1000000)", "the same"),
    Rule("test_history_buffer.py", r"\[\[-1\] \+ \[1\] \* \((.*)\)\]\)", r"[-1] + [1] * (\1))", "values are one row"),
    Rule("test_history_buffer.py", r"(log_buffer.update\(array_method\(\[1, 2\]\)\))", r"\1; log_buffer.current()", "a wrong value raises when it is read: update() runs in every iteration"),
]

LOG_PROCESSOR = [
    Rule("test_log_processor.py", r"log_processor.custom_cfg == \[\]", "log_processor.custom == []", "has another name"),
    Rule("test_log_processor.py", r"( +)log_processor._collect_scalars = \\\n +lambda \*args, \*\*kwargs: copy.deepcopy\(train_logs\)\n", r"\1bridge.fill(self.runner.message_hub, mode, train_logs)\n", "the figures come from the message hub"),
    Rule("test_log_processor.py", r" +log_processor._get_max_memory = MagicMock\(return_value='100'\)\n", "", "there is no memory to measure on the CPU: 0"),
    Rule("test_log_processor.py", r"log_processor._get_cur_loop\(self.runner, mode\)", "getattr(self.runner, f'{mode}_loop')", "a runner has its loops by name"),
    Rule("test_log_processor.py", r"log_processor._get_epoch\(self.runner, mode\)", "(2 if mode == 'train' else 1)", "as setUp has it"),
    Rule("test_log_processor.py", r"Epoch\(\{mode\}\)  \[", "Epoch({mode}) [", "one space"),
    Rule("test_log_processor.py", r"if is_cuda_available\(\) or is_musa_available\(\):\n( +)log_str \+= 'memory: 100  '", r"if True:\n\1log_str += 'memory: ' + str(tag['memory']) + '  '", "memory is always there"),
    Rule("test_log_processor.py", "            assert out == log_str", "            assert out.rstrip() == log_str.rstrip()", "no spaces at the end"),
    Rule("test_log_processor.py", r"( +)log_processor._collect_scalars = MagicMock\(return_value=scalar_logs\)\n +log_processor._collect_non_scalars = MagicMock\(\n +return_value=non_scalar_logs\)\n", r"\1bridge.fill(self.runner.message_hub, mode, scalar_logs, non_scalar_logs)\n", "the figures come from the message hub"),
    Rule("test_log_processor.py", r"MessageHub.get_instance\('log_processor_test'\)", "MessageHub('log_processor_test')", "one for each test"),
    Rule("test_log_processor.py", r"        for i in range\(10\):\n            message_hub.update_scalar\('\w+/\w+', .*\)\n", "", "the figures are those of the test"),
    Rule("test_log_processor.py", r"runner = MagicMock\(\)\n        runner.epoch = 1", r"runner = bridge.mock_runner()\n        runner.epoch = 1", "a device and the numbers of batches"),
]

HOOKS = [
    Rule(CASE, r"default_hooks=dict\(logger=dict\(type='LoggerHook', interval=1\)\)", "default_hooks=dict(logger=dict(type='LoggerHook', interval=1), checkpoint=dict(overwrite=True))", "a second run in a folder is refused without overwrite"),
    Rule(CASE, r"interval=12, by_epoch=False\)", "interval=12, by_epoch=False, overwrite=True)", "the same"),
    Rule("*", r"runner\.optim_wrapper = runner.build_optim_wrapper\(runner.optim_wrapper\)", "runner.model", "the model and the optimizer are set up together, when one is asked for"),
    Rule("*_hook.py", "'mmx.hooks.iter_timer_hook.time'", "'flextrain.runner.hooks.runtime_info.time'", "imports"),
    Rule("test_iter_timer_hook.py", r"def time\(cls\)", "def perf_counter(cls)", "another clock"),
    Rule("test_iter_timer_hook.py", r"\('eta'\), 180\)", "('eta'), 90)", "a training iteration asks the clock once"),
    Rule("test_iter_timer_hook.py", r"\[2\] \* 8", "[1] * 8", "a training iteration asks the clock once"),
    Rule("test_sampler_seed_hook.py", r"( +)(hook.before_train_epoch\(runner\))", r"\1runner.train_dataloader.batch_sampler.sampler.sampler = None\n\1\2", "a sampler may hold another, and a mock's have no end"),
    Rule("test_iter_timer_hook.py", r"hook.before_run\(runner\)", "hook.before_train(runner)", "time is measured from before_train on"),
    Rule("test_iter_timer_hook.py", r"(        for i in range\(2\):\n            hook.before_(val|test)_iter)", r"        hook.before_\2_epoch(runner)\n\1", "an evaluation begins with its epoch"),
    Rule("test_iter_timer_hook.py", r"        hook.after_(val|test)_epoch\(runner\)\n", "", "after its epoch the estimate is that of training again"),
    Rule("test_param_scheduler_hook.py", r"( +)(runner.param_schedulers = .*\n)", r"\1\2\1hook.before_train(runner)\n", "the hook sorts the schedulers when training begins"),
    Rule("test_param_scheduler_hook.py", r"runner = Mock\(\)", "runner = Mock(iter=0, epoch=0)", "what it has stepped after is counted from there"),
    Rule("test_param_scheduler_hook.py", r"( +)(scheduler\d?) = (Mock|MockParamScheduler)\(\)\n", r"\1\2 = \3()\n\1\2.optimizer = bridge.AFTER_AN_UPDATE\n", "a scheduler advances after an update"),
    Rule("test_param_scheduler_hook.py", r"assertRaisesRegex\(TypeError, self.error_msg\)", "assertRaises(TypeError)", "runner.param_schedulers is no attribute to set"),
    Rule("test_runtime_info_hook.py", r"(    def __len__\(self\):\n        return 12\n)", r"\1\n    def __getitem__(self, index):\n        return index\n", "a dataset has items"),
    Rule("test_runtime_info_hook.py", "( +)(hook.before_train_epoch)", r"\1hook.before_train(runner)\n\1\2", "the infos are set when training begins, and computed when they are read"),
    Rule("test_runtime_info_hook.py", r" +self.assert\w+\(hook.last_loop_stage.*\n", "", "an attribute of its own"),
    Rule("test_sampler_seed_hook.py", "runner.train_loop.dataloader", "runner.train_dataloader", "the runner has it"),
    Rule("test_sampler_seed_hook.py", r"        runner.train_dataloader.sampler.set_epoch.assert_called\(\)\n", r"        runner.train_dataloader.batch_sampler.sampler.set_epoch.assert_called()\n", "a batch sampler holds the sampler"),
    Rule("test_runtime_info_hook.py", r"( +)hook.before_train\(runner\)", r"\1runner.model\n\1hook.before_train(runner)", "the model is set up when it is asked for"),
    Rule("test_runtime_info_hook.py", r"( +)hook.before_train_iter\(", r"\1hook.before_train(runner)\n\1hook.before_train_iter(", "where to find the rates is worked out when training begins"),
    Rule("test_runtime_info_hook.py", r"        with self.assertRaisesRegex\(AssertionError,(.|\n)*?\n\n", "", "get_lr() of an OptimWrapper gives lists"),
    Rule("test_prepare_tta_hook.py", "'ToyTTAModel'", "'ToyTestTimeAugModel'", "an unknown name raises when the hook is made"),
    Rule("test_profiler_hook.py", r"runner = MagicMock\(\)", "runner = bridge.mock_runner()", "a device and the numbers of batches"),
    Rule("test_profiler_hook.py", r"hook.before_run\(runner\)", "hook.before_train(runner)", "training is recorded"),
    Rule("test_profiler_hook.py", r"hook.profiler.__exit__\(None, None, None\)", "hook.after_train(runner)", "the same"),
    Rule("test_profiler_hook.py", r"hook._export_chrome_trace\(runner\)", "hook.after_train(runner)", "the same"),
    Rule("test_profiler_hook.py", r"hook.on_trace_ready = ((?:.|\n)*?)\n +hook._parse_trace_config\(runner\)", r"bridge.profile_once(ProfilerHook(on_trace_ready=\1), runner)", "what to do with a trace is an argument"),
    Rule("test_profiler_hook.py", r"hook.profiler = MagicMock\(\)", "hook.profiler = seen = MagicMock()", "there is no profiler after it was stopped"),
    Rule("test_profiler_hook.py", "hook.profiler.__exit__.assert", "seen.stop.assert", "the same"),
    Rule("test_profiler_hook.py", "hook.profiler.step.assert_called_once", "seen.step.assert_called", "the same"),
    Rule("test_profiler_hook.py", r"( +)hook.after_train_iter\(runner, 1, 1, 1\)\n(?= +seen.stop)", r"\1for _ in range(10): hook.after_train_iter(runner, 1, 1, 1)\n", "iterations are counted from the start of the recording"),
    Rule("test_profiler_hook.py", "activity_with_cpu=False,", "activity_with_cpu=True,", "a profiler that records nothing is refused"),
    Rule("test_ema_hook.py", r"( +)ema_hook.before_run\(runner\)", r"\1runner.model\n\1ema_hook.before_run(runner)", "the model is set up when it is asked for"),
    Rule("test_ema_hook.py", r"        func = getattr\(ema_hook, func_name\)\n(.|\n)*", "        bridge.check_swap(ema_hook, runner, func_name, src_model, ema_model)\n", "averages and the model's own weights both stay, where MMEngine exchanges them: the model has the one, then the other"),
    Rule("test_checkpoint_hook.py", r"(\{training_type\}_[\w{}]+|test_(11|\{\}))\.pth", r"\1", "checkpoints are directories"),
    Rule("test_checkpoint_hook.py", r"ckpt\['message_hub'\]\['runtime_info'\]\['keep_ckpt_ids'\],\s+\[9,", "ckpt['hooks']['CheckpointHook/kept'], [8, 9,", "in the hook's own state; the oldest goes when the new one is complete"),
    Rule("test_checkpoint_hook.py", r"assertEqual\(best_ckpt_path,\s+ckpt\['message_hub'\]\['runtime_info'\]\['best_ckpt'\]\)", "assertIn(osp.basename(best_ckpt_path), bridge.best_of(best_ckpt))", "the same, in the best checkpoint"),
    Rule("test_ema_hook.py", r"( +)self.assertTrue\(\s+isinstance\(ema_hook.ema_model, ExponentialMovingAverage\)\)\n", r"\1self.assertTrue(ema_hook.state_dict())\n", "averages are tensors by name, no model"),
    Rule("test_ema_hook.py", r"torch.load\(", "bridge.read_checkpoint(", "checkpoints are directories"),
    Rule("test_checkpoint_hook.py", r"(?<=ckpt = )torch.load\(", "bridge.read_checkpoint(", "the same"),
    Rule("test_checkpoint_hook.py", r"osp.isfile\((?=osp.join\(cfg.work_dir|\s+osp.join\((cfg.work_dir|out_dir))", "osp.isdir(", "the same"),
    Rule("test_checkpoint_hook.py", r"by_epoch=training_type == 'epoch'\)(?=\n        common_cfg)", "by_epoch=training_type == 'epoch', overwrite=True)", "a second run in a folder is refused without overwrite"),
    Rule("test_ema_hook.py", "ema_hook.src_model", "runner.model", "the runner has it"),
    Rule("test_ema_hook.py", "ema_hook.ema_model", "bridge.Averages(ema_hook, runner)", "averages are tensors by name, no model"),
    Rule("test_ema_hook.py", "import BaseModel, ExponentialMovingAverage", r"import BaseModel\n\nExponentialMovingAverage = bridge.Averages", "the same"),
    Rule("test_early_stopping_hook.py", r"hook = EarlyStoppingHook\(", "hook = bridge.early_stopping(", "metrics count during training"),
    Rule("test_early_stopping_hook.py", r"runner = Mock\(\)\n    runner.train_loop = Mock\(\)", "runner = bridge.mock_runner()", "a device and the numbers of batches"),
    Rule("test_early_stopping_hook.py", r"with self.assertWarns\(UserWarning\)", "with self.assertLogs(runner.logger)", "warnings are logged"),
    Rule("test_early_stopping_hook.py", r"hook.best_score.item\(\)", "hook.best_score", "a number"),
    Rule("test_early_stopping_hook.py", r"OptimWrapper\(\s+torch.optim.Adam\(ToyModel\(\).parameters\(\)\)\)", "dict(optimizer=dict(type='Adam'))", "an optimizer holds the model's parameters"),
    Rule("test_logger_hook.py", r"with self.assertLogs\(logger, level='WARNING'\)", "with self.assertRaises(ValueError)", "file_client_args is refused"),
    Rule("test_logger_hook.py", r"runner = MagicMock\(\)(?=\n +runner.log_dir)", "runner = bridge.mock_runner()", "rank 0 writes"),
    Rule("test_logger_hook.py", r"runner\._log_dir", "runner.log_dir", "has a public name"),
]

RUNNER = [
    Rule("test_runner.py", "(type='CheckpointHook', interval=1, by_epoch=(True|False))", r"\1, overwrite=True", "a second run in a folder is refused without overwrite"),
    Rule("test_runner.py", r"( +)(self.iter_based_cfg.train_cfg = dict\(by_epoch=False, max_iters=12\))", r"\1\2\n\1self.iter_based_cfg.param_scheduler.by_epoch = False", "schedules by epoch have no effect there, which raises"),
    Rule("test_runner.py", r"self.assertIsInstance\(runner._(train|val|test)_loop, dict\)", r"self.assertIsNone(runner._\1_loop)", "loops are made when they are needed"),
    Rule("test_runner.py", r"runner\._hooks = \[\]\n\n? +(# .*\n +)?runner.register_default_hooks\(\)", "cfg.default_hooks = {}; runner = Runner.from_cfg(cfg)", "default hooks are an argument of the runner"),
    Rule("test_runner.py", r"( +runner._hooks = \[\]\n +# .*\n)? +runner.register_default_hooks\(hooks=(.*)\)", r"        cfg.default_hooks = \2; runner = Runner.from_cfg(cfg)", "the same"),
    Rule("test_runner.py", r"(?<=len\(runner._hooks\), )(5|6)\)(?=\n        # (`Param|the third))", r"\1 + 1)", "one default hook more, for NaN"),
    Rule("test_runner.py", r"runner._hooks\[4\], CheckpointHook", "runner._hooks[-1], CheckpointHook", "the same"),
    Rule("test_runner.py", r"        runner._hooks = \[\]\n(        custom_hooks = .*\n        runner.)register_hooks\(custom_hooks=", r"\1register_custom_hooks(", "the same"),
    Rule("test_runner.py", r"self.assertEqual\(runner.param_schedulers, None\)|self.assertIsNone\(runner.param_schedulers\)", "self.assertFalse(runner.param_schedulers)", "an empty list, or None"),
    Rule("test_runner.py", r"runner.logger, MMLogger", "runner.logger, logging.Logger", "logs go to Python's logging"),
    Rule("test_runner.py", r" +self.assertIsInstance\(runner\.(_\w+_dataloader|optim_wrapper|param_schedulers), dict\)\n", "", "what is not built yet is private"),
    Rule("test_runner.py", r"default_hooks=dict\(param_scheduler=toy_hook\)", "default_hooks=dict(param_scheduler=toy_hook, checkpoint=dict(overwrite=True))", "a second run in a folder is refused without overwrite"),
    Rule("test_runner.py", r" +self.assertEqual\(runner.optim_wrapper._(inner_count|max_counts), \d+\)\n", "", "counters of its own"),
    Rule("test_runner.py", r" +assert isinstance\(runner.train_loop.dataloader_iterator,\s+_InfiniteDataloaderIterator\)\n", "", "a private class"),
    Rule("test_runner.py", r"with self.assertLogs\(MMLogger.get_current_instance\(\), level='WARNING'\):(?=\n            runner.train)", "if True:", "any sampler is repeated, and nothing is lost"),
    Rule("test_runner.py", r"        # 7. test init weights\n(.|\n)*?(?=        # 8.1)", "", "runner.model is no attribute to set"),
    Rule("test_runner.py", r",\n +constructor='ToyMultipleOptimizerConstructor'\)", ")", "several optimizers by name need no constructor"),
    Rule("test_runner.py", r"runner.logger._log_file", "osp.join(runner.log_dir, f'{runner.timestamp}.log')", "where the log file is"),
    Rule("test_runner.py", r"assertRaisesRegex\(AssertionError, 'If you want to validate'\)", "assertRaisesRegex(bridge.FlexTrainError, 'neither forward nor val_step')", "other words"),
    Rule("test_runner.py", r"default_hooks = dict\(logger=dict\(type='LoggerHook', interval=5\)\)", "default_hooks = dict(logger=dict(type='LoggerHook', interval=5), checkpoint=dict(overwrite=True))", "a second run in a folder is refused without overwrite"),
    Rule("test_runner.py", r"        # 6.4 Test(.|\n)*?(?=        # 6.10)", "", "schedulers by name need optimizers by name; a built one needs this run's optimizer"),
    Rule("test_runner.py", r"runner\._hooks\b(?! = )", "runner.hooks", "has a public name"),
    Rule("test_runner.py", r"(?<=len\(runner.hooks\), )(6|7)\)(?=\n        (custom_hooks|self.assertTrue\(isinstance\(runner.hooks\[6\], ToyHook))", r"\1 + 1)", "one default hook more, for NaN"),
    Rule("test_runner.py", r"runner.hooks\[6\]", "runner.hooks[-1]", "the same"),
    Rule("test_runner.py", r"        # test evaluator must be a Evaluator instance\n        with self.assertRaisesRegex\(.*\n.*\n", "", "a built metric is taken too"),
    Rule("test_runner.py", r"        # diff_rank_seed is True\n(.|\n)*?\n\n", r"\n", "all processes have one order of the data; rank 0 has the seed itself"),
    Rule("test_runner.py", r"assertIsInstance\(dataloader.collate_fn, partial\)", "assertTrue(callable(dataloader.collate_fn))", "a function without arguments is used as it is"),
    Rule("test_runner.py", r"( +)(cfg.experiment_name = 'test_register_hook'\n)", r"\1\2\1cfg.default_hooks = dict.fromkeys(bridge.DEFAULT_HOOKS)\n", "default hooks are an argument of the runner"),
    Rule("test_runner.py", r"(def test_register_hook(?:.|\n)*?)runner._hooks = \[\]\n", r"\1runner = Runner.from_cfg(cfg)\n", "the same"),
    Rule("test_runner.py", r"(def test_register_hook(?:.|\n)*?) runner._hooks = \[\]\n", r"\1 runner = Runner.from_cfg(cfg)\n", "the same, a second time"),
    Rule("test_runner.py", r"( +)(runner.optim_wrapper = dict\(\n +key1)", r"\1runner.model\n\1\2", "the model and the optimizer are set up together"),
    Rule("test_runner.py", r"        with self.assertRaisesRegex\(ValueError,\s+'each item mush be an optimizer object'\):\n            (runner.build_optim_wrapper\(optim_cfg\))", r"        self.assertEqual(len(\1), 2)", "built ones and configurations may be mixed"),
    Rule("test_runner.py", r"(optim_cfg = dict\()key1=optim_wrapper1, key2=optim_wrapper2\)", r"\1linear1=optim_wrapper1, linear2=optim_wrapper2)", "the same; the name of one that is not built is that of a submodule"),
    Rule("test_runner.py", r"optim_wrapper\._accumulative_counts", "optim_wrapper.accumulate", "has a public name"),
    Rule("test_prepare_tta_hook.py", r"( +)runner.test\(\)\n +(self.assertIsInstance\(runner.model, BaseTTAModel\))", r"\1merged = bridge.merged_in_test(runner)\n\1self.assertIsInstance(merged, BaseTTAModel)", "the model is wrapped for the test alone"),
    Rule("test_runner.py", r"        runner.param_schedulers = None\n", "", "is no attribute to set"),
]
# fmt: on

RULES = [*IMPORTS, *SCHEDULERS, *CONSTRUCTORS, *WRAPPERS, *SAMPLERS, *MESSAGE_HUB, *LOG_PROCESSOR, *HOOKS, *RUNNER]


def translate(name: str, text: str, used: set[Rule]) -> str:
    """The text with all rules for a file of this name applied; rules that found something are added to ``used``."""
    for rule in RULES:
        if fnmatch(name, rule.files):
            text, count = re.subn(rule.old, rule.new, text)
            if count:
                used.add(rule)
    return text.replace("\n\n", "\n\nimport bridge\n", 1) if "bridge." in text else text
