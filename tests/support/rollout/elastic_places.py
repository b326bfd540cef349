"""A cluster for a pool whose engines join and leave."""

from megadapo.cluster.places import Place, PlaceRequest, Slot
from megadapo.errors import InfraError


class Places:
    """A cluster whose nodes and free slots a test decides."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = dict(enumerate(nodes))
        self.alive = {"a", "b", "c"}
        self.free: list[str] = []
        self.released: list[int] = []

    def alive_nodes(self) -> set[str]:
        return self.alive

    def engine_node(self, index: int) -> str:
        return self.nodes[index]

    def trainer_nodes(self) -> list[str]:
        return ["head"]

    def request_engine(self, num_ranks: int, *, without=()) -> "Waiting":
        return Waiting(self, set(without))

    def add_engine(self, index: int, place: Place) -> None:
        self.nodes[index] = place.node

    def release_engine(self, index: int) -> None:
        self.released.append(index)
        del self.nodes[index]


class Waiting(PlaceRequest):
    def __init__(self, places: Places, without: set[str]) -> None:
        self._places, self._without = places, without

    def poll(self) -> Place | None:
        for node in self._places.free:
            if node not in self._without:
                self._places.free.remove(node)
                if node == "broken":
                    raise InfraError("node broken: the model does not exist")
                return Place(None, [Slot(0, node, None)])
        return None

    def cancel(self) -> None:
        pass
