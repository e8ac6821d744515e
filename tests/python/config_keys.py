"""What the configuration classes of transformers have: their keys, defaults and optional values, as JSON.

usage: config_keys.py PYTHON... > tests/golden/transformers_config_keys.json

Each PYTHON has a release of transformers; the file has one entry a release. CLASSES are the classes that an import
reads; a release lacks those that are newer. A key is a field of the class (version 5) or an argument of its constructor
(version 4), of it or of its base class, a key that the base class takes out of the others (`kwargs.pop`), a setting of
generation, or a key of a rotary dictionary.
"""

import inspect
import json
import re
import subprocess
import sys

CLASSES = ["llama", "mistral", "ministral", "smollm3", "qwen2", "qwen3", "doge", "deepseek_v3",
           "minimax_m3_vl_text"]


def fields(cls):
    """Each key of a class by its default, and the keys that may be None."""
    import dataclasses

    keys, optional = {}, []
    own = {name for name in vars(cls).get("__annotations__", {})}
    if dataclasses.is_dataclass(cls):
        own_fields = [(field.name, field.default, str(field.type)) for field in dataclasses.fields(cls)]
    else:
        arguments = inspect.signature(cls.__init__).parameters.values()
        own_fields = [(p.name, p.default, "") for p in arguments if p.name not in ("self", "kwargs")]
        own = {name for name, *_ in own_fields}
    for name, default, kind in own_fields:
        if name in own:
            keys[name] = default
            if "None" in kind or default is None:
                optional.append(name)
    return keys, sorted(optional)


def release():
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, modeling_rope_utils
    from transformers.configuration_utils import PretrainedConfig

    classes = {}
    for name in CLASSES:
        if name not in CONFIG_MAPPING:
            continue
        cls = type(AutoConfig.for_model(name))
        keys, optional = fields(cls)
        classes[name] = {
            "class": cls.__name__,
            "defaults": keys,
            "optional": optional,
            "default_theta": keys.get("rope_theta", getattr(cls, "default_theta", None)),
        }
    base, _ = fields(PretrainedConfig)
    source = inspect.getsource(PretrainedConfig)
    mixin = getattr(modeling_rope_utils, "RotaryEmbeddingConfigMixin", None)
    source += inspect.getsource(mixin) if mixin else ""
    popped = re.findall(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)["']""", source)
    models = inspect.getsource(transformers.modeling_utils) + inspect.getsource(transformers.masking_utils)
    read = re.findall(r"""getattr\(config, ["'](\w+)["']""", models)
    in_rotary = r"""rope_(?:parameters|scaling)(?:_dict)?(?:\.get\(|\[)["'](\w+)["']"""
    rotary = re.findall(in_rotary, inspect.getsource(modeling_rope_utils))
    rotary += getattr(getattr(modeling_rope_utils, "RopeParameters", None), "__annotations__", {})
    ignored = {"cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "trust_remote_code",
               "subfolder", "_from_pipeline", "_from_auto", "gguf_file", "return_unused_kwargs", "_configuration_file",
               "repo_id"}
    return {
        "transformers": transformers.__version__,
        "classes": classes,
        "base": sorted(set(base) | set(popped) - ignored),
        "read_by_models": sorted(set(read)),
        "generation": sorted(key for key in GenerationConfig().to_dict() if key != "transformers_version"),
        "rotary": sorted(set(rotary)),
    }


def main():
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(release(), default=str))
        return
    releases = []
    for python in sys.argv[1:]:
        printed = subprocess.run([python, __file__, "--here"], check=True, capture_output=True, text=True).stdout
        releases.append(json.loads(printed.splitlines()[-1]))
    print(json.dumps(releases, indent=1))


if __name__ == "__main__":
    main()
