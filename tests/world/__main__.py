from tests.world import main

main()
