"""cluster.yaml, checked offline: by Ray, by EC2's service model, by the rules of this house."""

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
OF_RAY = {"SubnetIds"}  # Ray turns it into the SubnetId of RunInstances
Config = dict[str, Any]


@pytest.fixture(scope="module")
def run_instances() -> Any:
    model = botocore.session.get_session().get_service_model("ec2")
    return model.operation_model("RunInstances").input_shape


@pytest.fixture
def config() -> Config:
    loaded: Config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def node_configs(config: Config) -> dict[str, Config]:
    return {name: kind["node_config"] for name, kind in config["available_node_types"].items()}


def problems_for_ec2(node_config: Config, run_instances: Any) -> str:
    request = {key: value for key, value in node_config.items() if key not in OF_RAY}
    report = ParamValidator().validate({**request, "MinCount": 1, "MaxCount": 1}, run_instances)
    return str(report.generate_report())


def test_ray_accepts_the_file(config: Config) -> None:
    validate_config(prepare_config(config))


def test_rays_check_sees_a_wrong_key(config: Config) -> None:
    config["idle_timeout"] = 5
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
        validate_config(prepare_config(config))


def test_ec2_knows_every_key_of_every_node_config(config: Config, run_instances: Any) -> None:
    for name, node_config in node_configs(config).items():
        assert problems_for_ec2(node_config, run_instances) == "", name


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["InstanceTyp"], "m6i.xlarge"),
        (["IamInstanceProfile", "Nam"], "x"),
        (["BlockDeviceMappings", 0, "Ebs", "Size"], 100),
        (["BlockDeviceMappings", 0, "Ebs", "VolumeSize"], "large"),
    ],
)
def test_the_ec2_check_sees_a_mistake_at_any_depth(
    path: list[str | int], value: object, config: Config, run_instances: Any
) -> None:
    node_config = copy.deepcopy(node_configs(config)["head"])
    part: Any = node_config
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert str(path[-1]) in problems_for_ec2(node_config, run_instances)


def test_no_security_group_is_left_to_ray_which_opens_ssh_to_the_world(config: Config) -> None:
    assert "security_group" not in config["provider"]
    for node_config in node_configs(config).values():
        assert node_config["SecurityGroupIds"]
        assert node_config["SubnetIds"]  # a group belongs to one VPC, and so must the subnet


def test_every_ray_process_asks_for_the_token_and_every_machine_has_it(config: Config) -> None:
    starts = [
        command
        for commands in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[commands]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(command.startswith("export RAY_AUTH_MODE=token;") for command in starts)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_the_dashboard_listens_on_loopback_only(config: Config) -> None:
    (start,) = [c for c in config["head_start_ray_commands"] if "ray start" in c]
    assert "--dashboard-host=127.0.0.1" in start.split()


def test_the_head_is_on_demand_and_takes_no_training(config: Config) -> None:
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in head["node_config"]


def test_spot_machines_are_bought_before_the_same_on_demand(config: Config) -> None:
    kinds = config["available_node_types"]
    spot, on_demand = kinds["gpu_spot"], kinds["gpu_on_demand"]
    assert spot["priority"] > on_demand["priority"]
    assert spot["resources"] == on_demand["resources"]
    assert spot["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
    assert spot["node_config"] == on_demand["node_config"]


def test_machines_cost_nothing_while_nothing_waits(config: Config) -> None:
    kinds = config["available_node_types"]
    assert all(kind.get("min_workers", 0) == 0 for kind in kinds.values())
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert config["provider"]["cache_stopped_nodes"] is False


def test_disks_are_gp3_and_credentials_come_from_the_instance_profile(config: Config) -> None:
    for node_config in node_configs(config).values():
        disks = [each["Ebs"] for each in node_config["BlockDeviceMappings"]]
        assert all(disk["VolumeType"] == "gp3" and disk["Encrypted"] for disk in disks)
        assert node_config["IamInstanceProfile"]["Name"]
        assert node_config["MetadataOptions"]["HttpTokens"] == "required"
    assert "AWS_SECRET" not in (ROOT / "cluster.yaml").read_text()


def test_every_installation_is_pinned_by_the_constraints(config: Config) -> None:
    commands = [*config["setup_commands"], *config["head_setup_commands"]]
    installs = [command for command in commands if "pip install" in command]
    assert installs
    assert all("-c ~/rayway/constraints.txt" in command for command in installs)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={version('ray')}" in constraints


def test_every_mounted_file_but_the_token_is_in_the_repository(config: Config) -> None:
    mounted = [path for path in config["file_mounts"].values() if not path.startswith("~")]
    assert mounted
    assert all((ROOT / path).is_file() for path in mounted)


def test_the_header_says_that_it_is_checked_offline_only() -> None:
    header = (ROOT / "cluster.yaml").read_text().split("cluster_name:")[0]
    assert "Checked offline only" in header
