"""Programs as text: listings, trees and tables, and their parts."""
