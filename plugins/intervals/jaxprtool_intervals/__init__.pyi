from .domain import Interval as Interval
from .intervals import Intervals as Intervals
from .intervals import bounds as bounds
