"""Which models are served. There is one, under one name or several."""

from __future__ import annotations

from starlette.types import ASGIApp

from ..call import Call
from ..endpoint import json_response
from ..wire.models import Model, ModelList


async def models(call: Call) -> ASGIApp:
    """List the names under which the model is served."""
    return json_response(ModelList([_model(call, name) for name in call.service.model_names]))


async def model(call: Call) -> ASGIApp:
    """Tell about the model served under one name."""
    return json_response(_model(call, call.check_model(call.path_params["model"])))


def _model(call: Call, name: str) -> Model:
    service = call.service
    info = service.engine.model
    return Model(name, service.created, info.max_context, root=info.name)
